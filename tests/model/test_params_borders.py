"""Every list that a caller gives has a length that is accepted and one more that is refused; every number has such a border."""

import pytest

from attend.model import params
from attend.model.errors import InvalidRequest
from attend.model.params import DecodingParams, SamplingParams, StopRules

LONG = "x" * params.MAX_STOP_CHARACTERS
BORDERS = [
    (DecodingParams, "logit_bias", dict.fromkeys(range(300), 1.0), dict.fromkeys(range(301), 1.0)),
    (DecodingParams, "bad_words", ("x",) * 64, ("x",) * 65),
    (DecodingParams, "bad_words", (LONG,), (LONG + "x",)),
    (DecodingParams, "bad_words", ("x",), ("",)),
    (DecodingParams, "repetition_penalty", 2, 2.01),
    (DecodingParams, "repetition_penalty", 5e-324, 0),
    (DecodingParams, "presence_penalty", -2, -2.01),
    (DecodingParams, "presence_penalty", 2, 2.01),
    (DecodingParams, "frequency_penalty", -2, -2.01),
    (DecodingParams, "frequency_penalty", 2, 2.01),
    (StopRules, "stop", ("x",) * 4, ("x",) * 5),
    (StopRules, "stop", (LONG,), (LONG + "x",)),
    (StopRules, "stop", ("x",), ("",)),
    (StopRules, "stop_token_ids", (1,) * 300, (1,) * 301),
]


@pytest.mark.parametrize(("record", "field", "fits", "too_much"), BORDERS, ids=lambda value: str(value)[:20])
def test_what_fits_is_kept_and_one_more_is_refused_by_name(record, field, fits, too_much):
    assert getattr(record(**{field: fits}), field) == fits
    with pytest.raises(InvalidRequest, match=f"^{field} ") as caught:
        record(**{field: too_much})
    assert caught.value.field == field


@pytest.mark.parametrize("token", [0, 7])
def test_a_bias_is_from_minus_100_to_100_and_is_named_with_its_token(token):
    for bias in (-100, 100):
        assert DecodingParams(logit_bias={token: bias}).logit_bias == {token: bias}
        with pytest.raises(InvalidRequest, match=rf"^logit_bias\[{token}\]"):
            DecodingParams(logit_bias={token: 1.01 * bias})


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ({}, False),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
        ({"top_k": 1, "temperature": 0}, False),
        ({"top_p": 0.5, "temperature": 0}, False),
        ({"min_p": 0.5, "temperature": 0}, False),
    ],
    ids=str,
)
def test_a_token_is_drawn_among_some_where_any_limit_is_set_and_it_is_drawn_at_all(asked, limits):
    """What is not among some may be drawn ahead, before its mask: the engine asks."""
    assert SamplingParams(**asked).limits is limits


def test_what_is_remembered_of_a_record_is_its_own_unseen_and_no_part_of_it():
    one, other = DecodingParams(presence_penalty=1), DecodingParams(presence_penalty=1)
    one.derived_values["x"] = 1
    assert other.derived_values == {}
    assert one == other
    assert "derived_values" not in repr(one)
    with pytest.raises(TypeError, match="derived_values"):
        DecodingParams(derived_values={})
