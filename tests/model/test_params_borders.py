"""Every list that a caller gives has a length that is accepted and one more that is refused; every number has such a border."""

import pytest

from attend.model.params import DecodingParams, SamplingParams


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
