"""The one validator: every boundary is accepted, the next value refused, and the message says what and why."""

import math

import pytest

from attend.model.errors import InvalidRequest
from attend.model.params import SEED_HIGH, SEED_LOW, DecodingParams, SamplingParams, StopRules, describe, token_ids

LARGEST = 2**31 - 1
ABOVE_2, ABOVE_1, BELOW_0, ABOVE_0 = (math.nextafter(2, 3), math.nextafter(1, 2), math.nextafter(0, -1), math.nextafter(0, 1))
NUMBERS = ("temperature", "top_p", "min_p")
INTEGERS = ("top_k", "seed", "max_tokens", "min_tokens")

ACCEPTED = {
    "temperature": (0, 0.0, ABOVE_0, 1, 2, 2.0),
    "top_k": (-1, 0, 1, LARGEST, SEED_HIGH),
    "top_p": (0, 0.0, ABOVE_0, 0.5, 1, 1.0),
    "min_p": (0, 0.0, 0.5, 1, 1.0),
    "seed": (None, SEED_LOW, -1, 0, SEED_HIGH),
    "max_tokens": (0, 1, 16, LARGEST),
    "min_tokens": (0, 16),
    "stop": ((), ("a",), ("a" * 256,), ("a", "b", "c", "d"), ("\0",), ("\U0001f680" * 256,)),
    "stop_token_ids": ((), (0,), tuple(range(300))),
}
REFUSED = {
    "temperature": (BELOW_0, -1, ABOVE_2, 3),
    "top_k": (-2, SEED_HIGH + 1),
    "top_p": (BELOW_0, -0.5, ABOVE_1, 2),
    "min_p": (BELOW_0, -1, ABOVE_1, 2),
    "seed": (SEED_LOW - 1, SEED_HIGH + 1),
    "max_tokens": (-1, LARGEST + 1),
    "min_tokens": (-1, 17),
    "stop": (("",), ("a" * 257,), ("a", "b", "c", "d", "e"), ("a", ""), (7,), (None,), (b"a",)),
    "stop_token_ids": (tuple(range(301)),),
}
NO_NUMBER = (True, False, "1", [1], {}, (1,), math.nan, math.inf, -math.inf, 10**400, -(10**5000), 1j)
NO_INTEGER = (*NO_NUMBER, 3.0, 0.5)


def cases(table):
    return [
        pytest.param(field, value, id=f"{field}-{str(value)[:24]!r}") for field, values in table.items() for value in values
    ]


def make(field, value):
    return (SamplingParams if field in SamplingParams.__slots__ else StopRules)(**{field: value})


@pytest.mark.parametrize(("field", "value"), cases(ACCEPTED))
def test_every_boundary_is_accepted_as_it_is(field, value):
    assert value == getattr(make(field, value), field)


@pytest.mark.parametrize(("field", "value"), cases(REFUSED))
def test_the_next_value_beyond_a_boundary_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=f"^{field} m") as caught:
        make(field, value)
    assert field == caught.value.field


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBER, ids=lambda value: type(value).__name__)
def test_what_is_no_finite_number_in_range_is_refused(field, value):
    """Not numbers: booleans, texts, NaN, and integers so large that Python refuses to make floats or digits of them."""
    with pytest.raises(InvalidRequest, match=f"^{field} must be a number") as caught:
        make(field, value)
    assert field == caught.value.field


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", NO_INTEGER, ids=lambda value: type(value).__name__)
def test_what_is_no_integer_in_range_is_refused(field, value):
    """3.0 is no integer, and true is not 1."""
    with pytest.raises(InvalidRequest, match=f"^{field} must be an integer") as caught:
        make(field, value)
    assert field == caught.value.field


def test_min_tokens_may_reach_max_tokens_and_no_further():
    assert 5 == StopRules(max_tokens=5, min_tokens=5).min_tokens
    with pytest.raises(InvalidRequest, match=r"^min_tokens must be an integer from 0 to 5; got 6 \(integer\)$"):
        StopRules(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "true (boolean)"),
        (False, "false (boolean)"),
        (7, "7 (integer)"),
        (0.5, "0.5 (number)"),
        (math.nan, "nan (number)"),
        ("7", "'7' (string)"),
        (None, "null"),
        ([1, 2], "[1, 2] (list)"),
        ({"a": 1}, "{'a': 1} (object)"),
        ((1,), "(1,) (tuple)"),
        ("a" * 64, f"'{'a' * 64}' (string)"),
        ("a" * 65, f"'{'a' * 64}...' (string)"),
        ([1] * 500, f"{'[' + '1, ' * 21}... (list)"),
        (10**100, f"1{'0' * 63}... (integer)"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_message_shows_a_value_by_type_and_64_characters(value, shown):
    assert shown == describe(value)


def test_without_max_tokens_min_tokens_has_the_limit_that_max_tokens_has():
    """How much the context leaves is known only where the prompt is."""
    assert LARGEST == StopRules(max_tokens=None, min_tokens=LARGEST).min_tokens
    with pytest.raises(InvalidRequest, match=f"^min_tokens must be an integer from 0 to {LARGEST}; got"):
        StopRules(max_tokens=None, min_tokens=LARGEST + 1)


@pytest.mark.parametrize("ids", [(), (0,), (95,), [0, 95, 0]])
def test_token_ids_of_the_vocabulary_come_back_as_a_tuple(ids):
    assert tuple(ids) == token_ids("prompt", ids, 96)


@pytest.mark.parametrize("wrong", [-1, 96, 2**31, 2**63, 1.0, True, "1", None, math.nan, [1]], ids=str)
def test_one_token_id_outside_the_vocabulary_refuses_them_all(wrong):
    with pytest.raises(
        InvalidRequest, match=r"^prompt must hold token ids of the vocabulary, integers from 0 to 95; got "
    ) as caught:
        token_ids("prompt", [0, wrong], 96)
    assert "prompt" == caught.value.field


def test_what_is_remembered_of_a_record_is_its_own_unseen_and_no_part_of_it():
    one, other = DecodingParams(presence_penalty=1), DecodingParams(presence_penalty=1)
    one.derived_values["x"] = 1
    assert other.derived_values == {}
    assert one == other
    assert "derived_values" not in repr(one)
    with pytest.raises(TypeError, match="derived_values"):
        DecodingParams(derived_values={})
