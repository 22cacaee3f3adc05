"""The fields of /v1/completions: their JSON types, strictly, and what this build refuses by name."""

import re

import pytest

from attend.model.errors import InvalidRequest
from attend.model.text.grammar import GrammarSpec
from attend.service.chat.forms import form_of
from attend.service.contract.commands import to_command
from attend.service.contract.requests import CompletionRequest
from attend.service.contract.structured import grammar_of
from tests.service.contract.asked import calling_of, messages_of
from tests.service.contract.wrong import wrong_types

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
WRONG = wrong_types(
    CompletionRequest,
    {
        "prompt": (
            1,
            1.5,
            True,
            {},
            [1.5],
            ["a", 1],
            [1, "a"],
            [True],
            [[1.0]],
            [["a"]],
            [[[1]]],
            [None],
            [[1], "a"],
            ["a", [1]],
        ),
        "stop": (1, True, {}, [1], ["a", None], [["a"]]),
        "logit_bias": (1, True, "x", [], [[5, 1]], {"5": "1"}, {"5": None}, {"5": True}, {"5": [1]}),
    },
)
INTEGERS = [name for name, value in WRONG if value == 1e2]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_type_is_refused_with_the_field(name, value):
    with pytest.raises(InvalidRequest) as caught:
        CompletionRequest.read({"prompt": "a", name: value})
    assert caught.value.field in (name, f"{name}[0]", f"{name}[1]")
    assert re.match(rf"{name}(\[\d\])* must (be|hold) ", str(caught.value))
    assert "got" in str(caught.value)


@pytest.mark.parametrize(
    "document",
    [
        {"prompt": [{}] * 99999},
        {"prompt": [1.5] * 99999},
        {"prompt": [[None] * 99999]},
        {"stop": [1] * 99999},
        {"bad_words": [1] * 99999},
        {"allowed_token_ids": ["1"] * 99999},
        {"logit_bias": dict.fromkeys(map(str, range(99999)), "x")},
        dict.fromkeys(map(str, range(99999)), 1),
    ],
    ids=lambda document: next(iter(document)),
)
def test_what_is_wrong_a_hundred_thousand_times_is_looked_at_once(document):
    with pytest.raises(InvalidRequest) as caught:
        CompletionRequest.read(document)
    cause = caught.value.__cause__
    assert cause is None or cause.error_count() <= 4  # one for each kind that a field may have


@pytest.mark.parametrize("name", sorted({*CompletionRequest.names, *CompletionRequest.unsupported} - {"prompt"}))
def test_null_is_as_good_as_absent(name):
    document = {"prompt": "a", "seed": 1}
    asked = {key: value for key, value in document.items() if key != name}
    assert CompletionRequest.read(asked | {name: None}) == CompletionRequest.read(asked)


def test_null_of_a_name_that_is_not_known_is_absent_everywhere():
    null = {"prediction": None}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    nulls = {"stream": True, "stream_options": {"include_usage": True} | null} | null
    assert CompletionRequest.read({"prompt": "a"} | nulls) == CompletionRequest.read({"prompt": "a"} | options)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"} | null]} | null]
    assert messages_of(messages) == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools, choice = (
        [{"type": "function", "function": {"name": "f"} | null} | null],
        {"type": "function", "function": {"name": "f"}},
    )
    assert len(calling_of(tools, choice | null, None, form_of("", "hermes")).tools) == 1
    schema = {"type": "json_schema", "json_schema": {"schema": {}} | null} | null
    llama_cpp = {"type": "json_object", "schema": {}}
    for asked in ({"response_format": schema}, {"response_format": llama_cpp}, {"structured_outputs": {"json": {}} | null}):
        body = CompletionRequest.read({"prompt": "a"} | asked)
        assert grammar_of(body.structured_outputs, body.response_format, "response_format") == GrammarSpec("json_schema", "{}")


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"promt": "a"}, "promt"),
        ({"Prompt": "a"}, "Prompt"),
        ({"": 1}, ""),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
        ({"x" * 500: 1}, "x" * 64),
    ],
)
def test_an_unknown_field_is_refused_by_name(document, field):
    with pytest.raises(InvalidRequest, match="is not a field of this request") as caught:
        CompletionRequest.read({"prompt": "a"} | document)
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_be_an_integer(name):
    asked = to_command(CompletionRequest.read({"prompt": "a", name: 1}), "id")
    assert getattr(asked.decoding if name.endswith("penalty") else asked.sampling, name) == 1


@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", [10**399, -(10**399)])
def test_a_number_beyond_all_bounds_is_a_mistake_like_any_other(name, value):
    with pytest.raises(InvalidRequest) as caught:
        to_command(CompletionRequest.read({"prompt": "a", name: value}), "id")
    assert caught.value.field == name
