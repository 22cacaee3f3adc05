"""The table of errors: complete, one row a meaning, and silent about our insides."""

import pytest
from grpc import StatusCode

from attend.model import errors
from attend.model.errors import AttendError, EngineFailed, InvalidRequest, ModelNotFound
from attend.service.errors import INTERNAL, TABLE, HeadTooLarge, TooLarge, advice, field_of, sentence, wire
from attend.service.http_api.problems import in_anthropics


def descendants(kind: type) -> set[type]:
    return {kind} | {below for child in kind.__subclasses__() for below in descendants(child)}


OURS = {kind for kind in descendants(AttendError) if kind.__module__ in ("attend.model.errors", "attend.service.errors")}
INSIDE = {AttendError, EngineFailed, errors.OutOfMemory, errors.DeviceFailed, errors.CheckpointError, errors.SettingError}
"""What no caller can cause or repair: they are told nothing."""


@pytest.mark.parametrize("kind", sorted(OURS, key=lambda kind: kind.__name__))
def test_each_error_has_a_row_or_an_ancestor_with_one_unless_it_is_ours_alone(kind):
    more = (1, "key_tokens") if kind is errors.RateLimited else ()
    assert (wire(kind("words", *more)) is INTERNAL) == (kind in INSIDE)


def test_each_row_has_a_code_of_its_own_and_never_422():
    rows = [*TABLE.values(), INTERNAL]
    assert TABLE[HeadTooLarge].code == TABLE[TooLarge].code  # they differ in their status
    assert len({row.code for row in rows}) == len(rows) - 1
    assert all(400 <= row.status < 600 and row.status != 422 for row in rows)
    assert StatusCode.OK not in {row.grpc for row in rows}


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("InvalidRequest", 400, StatusCode.INVALID_ARGUMENT),
        ("NotSupported", 400, StatusCode.INVALID_ARGUMENT),
        ("ContextTooLong", 400, StatusCode.INVALID_ARGUMENT),
        ("TooLarge", 413, StatusCode.RESOURCE_EXHAUSTED),
        ("WrongMediaType", 415, StatusCode.INVALID_ARGUMENT),
        ("ModelNotFound", 404, StatusCode.NOT_FOUND),
        ("Overloaded", 429, StatusCode.RESOURCE_EXHAUSTED),
        ("Unavailable", 503, StatusCode.UNAVAILABLE),
        ("DeadlineExceeded", 504, StatusCode.DEADLINE_EXCEEDED),
        ("EngineFailed", 500, StatusCode.INTERNAL),
    ],
)
def test_the_codes_are_those_of_the_contract(kind, status, code):
    row = wire(next(one for one in OURS if one.__name__ == kind)("words"))
    assert (row.status, row.grpc) == (status, code)


@pytest.mark.parametrize(
    "error", [ValueError("secret"), EngineFailed("secret"), KeyError("secret"), errors.CheckpointError("secret")]
)
def test_a_bug_says_its_request_id_and_nothing_else(error):
    assert wire(error) is INTERNAL
    assert sentence(error, "id-7") == "internal error; request id id-7"


def test_a_mistake_is_told_in_our_words_with_its_field():
    error = InvalidRequest("n must be small", "n")
    assert (sentence(error, "id"), field_of(error)) == ("n must be small", "n")
    assert field_of(ModelNotFound("none")) == "model"
    assert field_of(ValueError("n")) is None


def test_an_error_of_a_kind_that_is_not_in_the_table_is_treated_as_its_ancestor():
    class Special(errors.ContextTooLong):
        pass

    assert wire(Special("words")) is TABLE[errors.ContextTooLong]


@pytest.mark.parametrize(
    ("error", "beside"),
    [
        (errors.Overloaded("words", 3), {"retry-after": "3"}),
        (errors.QueueFull("words"), {"retry-after": "1"}),
        (errors.RateLimited("words", 9, "key_tokens"), {"retry-after": "9"}),
        (errors.Unavailable("words"), {"retry-after": "1"}),
        (InvalidRequest("words"), {}),
        (ValueError("words"), {}),
    ],
)
def test_a_caller_is_told_when_to_come_again(error, beside):
    assert advice(error) == beside


@pytest.mark.parametrize("row", [*TABLE.values(), INTERNAL], ids=lambda row: row.code)
def test_on_the_routes_of_anthropics_api_an_error_has_a_type_that_their_clients_know(row):
    said = in_anthropics({"error": {"message": "", "type": row.kind, "param": None, "code": row.code}}, row.status, "id")
    assert said["error"]["type"] == THEIRS.get(row.status, "invalid_request_error")


THEIRS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    507: "api_error",
}
