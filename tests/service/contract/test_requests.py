"""The fields of /v1/completions: their JSON types, strictly, and what this build refuses by name."""

import re

import pytest

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.text.grammar import GrammarSpec
from attend.service.chat.forms import form_of
from attend.service.contract.commands import to_command
from attend.service.contract.requests import OFF, CompletionRequest, read_completion
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
ON = {
    "messages": [[], [{"role": "user", "content": "a"}]],
    "max_completion_tokens": [3],
    "chat_template_kwargs": [{}],
    "reasoning_effort": ["low"],
    "tools": [[]],
    "tool_choice": ["auto"],
    "parallel_tool_calls": [True],
    "top_logprobs": [0],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "thinking_token_budget": [5],
}


def test_every_field_that_is_off_has_values_that_ask_for_something():
    assert set(ON) == set(OFF)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_type_is_refused_with_the_field(name, value):
    with pytest.raises(InvalidRequest) as caught:
        read_completion({"prompt": "a", name: value})
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
        read_completion(document)
    cause = caught.value.__cause__
    assert cause is None or cause.error_count() <= 4  # one for each kind that a field may have


def test_a_wrong_type_inside_an_object_is_refused_with_the_path():
    with pytest.raises(InvalidRequest, match=r"^stream_options.include_usage must be a boolean; got 1 \(integer\)") as caught:
        read_completion({"stream_options": {"include_usage": 1}})
    assert caught.value.field == "stream_options.include_usage"


@pytest.mark.parametrize("name", sorted({*CompletionRequest.model_fields} - {"prompt"}))  # which is required
def test_null_is_as_good_as_absent(name):
    document = {"prompt": "a", "seed": 1}
    asked = {key: value for key, value in document.items() if key != name}
    assert read_completion(asked | {name: None}) == read_completion(asked)


def test_null_of_a_name_that_is_not_known_is_absent_everywhere():
    null = {"prediction": None}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    nulls = {"stream": True, "stream_options": {"include_usage": True} | null} | null
    assert read_completion({"prompt": "a"} | nulls) == read_completion({"prompt": "a"} | options)
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
        body = read_completion({"prompt": "a"} | asked)
        assert grammar_of(body.structured_outputs, body.response_format, "response_format") == GrammarSpec("json_schema", "{}")


@pytest.mark.parametrize("name", sorted(OFF))
def test_null_switches_every_unbuilt_field_off(name):
    assert read_completion({"prompt": "a", name: None}) == read_completion({"prompt": "a"})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ON.items() for value in values])
def test_a_value_that_asks_for_something_is_refused_by_name(name, value):
    with pytest.raises(
        NotSupported, match=f"^{name} is not supported(: it is a field of POST /v1/chat/completions)?; got "
    ) as caught:
        read_completion({"prompt": "a", name: value})
    assert caught.value.field == name


def test_what_is_not_carried_out_is_told_before_a_wrong_type():
    with pytest.raises(NotSupported) as caught:
        read_completion({"messages": "x", "echo": 1})
    assert caught.value.field == "messages"


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
        read_completion({"prompt": "a"} | document)
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


def test_a_long_value_is_cut_short_in_the_message():
    with pytest.raises(InvalidRequest) as caught:
        read_completion({"prompt": "a", "n": "9" * 100_000})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("prompt", ["", "a", [], ["a", ""], [1, 2], [[1], [2, 3]], [[]], "\0", "😀"])
def test_each_shape_of_prompt_has_its_type(prompt):
    assert read_completion({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_may_be_an_integer(name):
    asked = to_command(read_completion({"prompt": "a", name: 1}), "id")
    assert getattr(asked.decoding if name.endswith("penalty") else asked.sampling, name) == 1


@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", [10**399, -(10**399)])
def test_a_number_beyond_all_bounds_is_a_mistake_like_any_other(name, value):
    with pytest.raises(InvalidRequest) as caught:
        to_command(read_completion({"prompt": "a", name: value}), "id")
    assert caught.value.field == name
