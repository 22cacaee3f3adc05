"""OpenAI's chat: what a body may say, the prompt and the command that it makes, and the objects that answer it."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from attend.model.engine.request import FinishReason, Times, TokenLogprob
from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams, StopRules
from attend.model.text.chat import ChatTemplate
from attend.model.text.grammar import GrammarSpec
from attend.service.chat.forms import TEXT_ALONE
from attend.service.contract.chat import OFF, ChatRequest, read_chat
from attend.service.contract.commands import to_command
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.merging import merge_chunks
from attend.service.records import ChatRules, Chunk, Command, PromptPart, TokenCounts
from tests.service.contract.asked import messages_of
from tests.service.contract.wrong import wrong_types
from tests.service.http_api.described import as_read

SHIPPED = ChatTemplate("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
ROLES = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.content }}|{% endfor %}{{ flag }}")
HELLO = [{"role": "user", "content": "hello"}]
VOCAB = 1000
ALONE = ChatRules(TEXT_ALONE)
DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}


def read(**body) -> ChatRequest:
    return read_chat({"messages": HELLO} | body)


def command(**body) -> Command:
    return replace(to_command(read(**body), "id", template=SHIPPED), prompts=((1, 2),))


def prompt(body: ChatRequest, template: ChatTemplate = SHIPPED) -> str:
    """What the template makes of a body."""
    return to_command(body, "id", template=template).prompts[0].write().text


def messages(*given) -> list[dict]:
    return messages_of(list(given))


# --- fields

WRONG = wrong_types(
    ChatRequest,
    {
        "stop": (1, True, {}, [1], ["a", None]),
        "logit_bias": ([], 1, "x"),
        "messages": ("hi", 1, {}, True),
        "tools": ("x", 1, {}),
        "tool_choice": (),  # read with the tools
        "reasoning_effort": (1, True, []),
    },
)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_type_is_refused_with_the_field(name, value):
    with pytest.raises(InvalidRequest, match=rf"^{name}(\[\d+\])? must (be|hold|have) .*; got ") as caught:
        read(**{name: value})
    assert caught.value.field.partition("[")[0] == name


@pytest.mark.parametrize("name", sorted({*ChatRequest.model_fields, *OFF} - {"messages"}))
def test_null_is_as_good_as_absent(name):
    assert read(**{name: None}) == read()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, rule in OFF.items() for value in rule.values or ()])
def test_a_value_that_asks_for_nothing_is_accepted(name, value):
    assert read(**{name: value}) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [("functions", [{"name": "f"}]), ("function_call", "auto"), ("prompt", "a"), ("echo", 1), ("best_of", 2), ("audio", {})],
)
def test_what_is_not_carried_out_is_refused_in_so_many_words(name, value):
    with pytest.raises(NotSupported, match=f"^{name} is not supported: [a-zA-Z/_1 ]+; got ") as caught:
        read(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["cache_control", "Messages", "__proto__"])
def test_an_unknown_field_is_refused_by_name(name):
    with pytest.raises(InvalidRequest, match=f"^{name} is not a field") as caught:
        read(**{name: 1})
    assert caught.value.field == name


# --- messages


def test_a_message_is_a_role_a_text_and_a_name():
    nothing = {"tool_calls": None, "refusal": None, "annotations": [], "audio": None}
    pairs = [
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        ({"role": "user", "content": "u", "name": "Ann"}, {"role": "user", "content": "u", "name": "Ann"}),
        ({"role": "assistant", "content": None, **nothing}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
    ]
    assert messages(*(given for given, _ in pairs)) == [read for _, read in pairs]


def test_text_parts_are_lines_of_one_text_unless_the_template_writes_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    body = read(messages=[{"role": "user", "content": parts}])
    assert prompt(body) == "a\n\nb\n"
    assert prompt(body, ChatTemplate("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}")) == "[a][][b]"


TEXT = {"type": "text", "text": "a"}
MISTAKES = [
    (None, "messages[0]", "object"),
    ("hi", "messages[0]", "object"),
    ({"content": "a"}, "messages[0].role", "is required"),
    ({"role": 1, "content": "a"}, "messages[0].role", "1 (integer)"),
    ({"role": "USER", "content": "a"}, "messages[0].role", "'USER' (string)"),
    ({"role": ["user"], "content": "a"}, "messages[0].role", "(list)"),
    ({"role": "function", "content": "a"}, "messages[0].role", "'function'"),
    ({"role": "user"}, "messages[0].content", "is required"),
    ({"role": "user", "content": None}, "messages[0].content", "is required"),
    ({"role": "user", "content": 1}, "messages[0].content", "1 (integer)"),
    ({"role": "user", "content": {"text": "a"}}, "messages[0].content", "(object)"),
    ({"role": "user", "content": ["a"]}, "messages[0].content[0]", "object"),
    ({"role": "user", "content": [TEXT, {}]}, "messages[0].content[1].type", "is required"),
    ({"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]}, "messages[0].content[1].type", "'image_url'"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type", "'input_audio'"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "is required"),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text", "1 (integer)"),
    ({"role": "user", "content": [TEXT | {"x": 1}]}, "messages[0].content[0].x", "not a field"),
    ({"role": "user", "content": "a", "name": 1}, "messages[0].name", "1 (integer)"),
    ({"role": "user", "content": "a", "name": "x" * 257}, "messages[0].name", "256 characters"),
    ({"role": "user", "content": "a", "tool_call_id": "c"}, "messages[0].tool_call_id", "not a field"),
    ({"role": "user", "content": "a", "bogus": 1}, "messages[0].bogus", "not a field"),
    ({"role": "user", "content": "a", "function_call": {"name": "f"}}, "messages[0].function_call", "not supported"),
    ({"role": "user", "content": "a", "reasoning": "x"}, "messages[0].reasoning", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "place", "words"), MISTAKES)
def test_a_mistake_is_named_with_its_place(message, place, words):
    with pytest.raises(InvalidRequest) as caught:
        messages(message)
    assert str(caught.value).startswith(place + " ") and words in str(caught.value)
    assert caught.value.field == place
    with pytest.raises(InvalidRequest) as caught:
        messages(*HELLO, message)
    assert str(caught.value).startswith(place.replace("[0]", "[1]", 1))


def test_1_to_2048_messages_are_taken():
    assert len(messages(*HELLO * 2048)) == 2048
    for number in (0, 2049):
        with pytest.raises(InvalidRequest, match=f"^messages must hold 1 to 2048 messages; got {number}$"):
            messages(*HELLO * number)
    for body in ({}, {"messages": None}):
        with pytest.raises(InvalidRequest, match=r"^messages is required"):
            read_chat(body)


def test_a_prompt_is_the_rendered_messages():
    talk = [{"role": "developer", "content": "be"}, {"role": "user", "name": "Ann", "content": [TEXT]}]
    assert prompt(read(messages=talk)) == "be\na\n"
    assert prompt(read(messages=talk), ROLES) == "system::be|user:Ann:a|"
    assert prompt(read(messages=talk, chat_template_kwargs={"flag": "f"}), ROLES).endswith("|f")
    literal = "{{7*7}} {% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}"
    assert prompt(read(messages=[{"role": "user", "content": literal}])) == literal + "\n"


# --- commands


def test_bare_messages_mean_the_contracts_defaults():
    bare = Command(
        prompts=((1, 2),),
        sampling=SamplingParams(),
        stops=StopRules(max_tokens=None),
        request_id="id",
        chat=ALONE,
        names=("messages",),
    )
    assert command() == bare
    assert command().decoding is NO_CHANGE


CHANGES = {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
EVERYTHING: dict[str, Any] = {
    "model": "m", "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": -3,
    "top_k": 7, "min_p": 0.1, "stop_token_ids": [4], "include_stop_str_in_output": True, "ignore_eos": True,
    "min_tokens": 1, "skip_special_tokens": False, "deadline_ms": 9, **CHANGES,
    "logit_bias": {"7": -1}, "bad_words": ["no"], "allowed_token_ids": [7, 8],
    "logprobs": True, "top_logprobs": 20,
    "truncate_prompt_tokens": 3, "cache_salt": "s", "priority": 9,
}  # fmt: skip
"""A value of each field that gRPC has too, and that is not the default."""


def test_every_field_reaches_the_command():
    body = EVERYTHING | {"max_completion_tokens": 5, "user": "u"}
    assert command(**body) == Command(
        prompts=((1, 2),),
        sampling=SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=-3),
        stops=StopRules(
            max_tokens=5, min_tokens=1, stop=("x",), stop_token_ids=(4,), include_stop_str_in_output=True, ignore_eos=True
        ),
        decoding=DecodingParams(**CHANGES, logit_bias={7: -1}, bad_words=("no",), allowed_token_ids=(7, 8)),
        **{"n": 2, "model": "m", "request_id": "id", "deadline_ms": 9, "skip_special_tokens": False},
        **{
            "logprobs": 20,
            "truncate_prompt_tokens": 3,
            "cache_salt": "s",
            "priority": 9,
            "chat": ALONE,
            "names": ("messages",),
        },
    )


def test_structured_output_reaches_the_command_under_both_names():
    by_format = command(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}})
    by_name = command(structured_outputs={"json": {"type": "object"}})
    assert by_format.grammar == by_name.grammar == GrammarSpec("json_schema", '{"type": "object"}')
    assert command(response_format={"type": "text"}).grammar is None
    with pytest.raises(InvalidRequest, match="cannot both be given"):
        command(response_format={"type": "json_object"}, structured_outputs={"json_object": True})


def test_the_longest_answer_has_two_names_and_one_meaning():
    for body in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert command(**body).stops.max_tokens == 5
    with pytest.raises(InvalidRequest, match="max_tokens is 5 and max_completion_tokens is 6") as caught:
        command(max_tokens=5, max_completion_tokens=6)
    assert caught.value.field == "max_completion_tokens"


def test_logprobs_are_a_switch_and_a_number():
    assert command(logprobs=False).logprobs is None
    assert command(logprobs=True).logprobs == 0
    assert command(logprobs=True, top_logprobs=0).logprobs == 0
    assert command(logprobs=True, top_logprobs=2).logprobs == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"model": ""}, "model"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_field(body, field):
    with pytest.raises(InvalidRequest, match=f"^{re.escape(field)} ") as caught:
        command(**body)
    assert caught.value.field == field


# --- answers


class Words:
    """A tokenizer with a few tokens of its own."""

    def text_of(self, token: int) -> str:
        return {300: "é", 301: "<|end|>", 302: "bytes:\\xc3"}.get(token, chr(token))

    def bytes_of(self, token: int) -> bytes:
        return {300: "é".encode(), 301: b"<|end|>", 302: b"\xc3"}.get(token, chr(token).encode())


def writer(n: int = 1, **body) -> ChatWriter:
    return ChatWriter(read(**body), "r7", "m", "fp", TokenCounts(n), Words(), created=1_700_000_000)


def chunk(index: int, text: str, total: int, reason: FinishReason | None = None, stop=None, **more) -> Chunk:
    return Chunk(index, text, tuple(text.encode()), total, 5, 42, reason, stop, **more)


HEAD = {"id": "chatcmpl-r7", "created": 1_700_000_000, "model": "m", "system_fingerprint": "fp"}


def test_each_answer_begins_with_its_role_and_only_begins_so():
    one = writer(n=2)
    deltas = [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for piece in (
            chunk(1, "a", 1),
            chunk(0, "b", 1),
            chunk(1, "c", 2, FinishReason.LENGTH),
            chunk(0, "", 2, FinishReason.STOP),
        )
        for event in one.events(piece)
        for choice in event["choices"]
    ]
    begin = {"role": "assistant", "content": ""}
    assert deltas == [
        (1, begin, None), (1, {"content": "a"}, None), (0, begin, None), (0, {"content": "b"}, None),
        (1, {"content": "c"}, None), (1, {}, "length"), (0, {}, "stop"),
    ]  # fmt: skip


def test_the_deltas_put_together_are_the_message():
    pieces = [chunk(index, text, 1) for index, text in ((0, "a"), (1, "x"), (0, "é"), (1, ""), (0, "c"))]
    stream, texts = writer(n=2), {0: "", 1: ""}
    for piece in pieces:
        for event in stream.events(piece):
            texts[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert texts == {
        choice["index"]: choice["message"]["content"] for choice in writer(n=2).full_response(merge_chunks(pieces))["choices"]
    }


def test_log_probabilities_are_golden_and_never_infinite():
    scored = TokenLogprob(97, -0.5, ((97, -0.5), (300, -1.5), (301, float("-inf"))))
    piece = replace(chunk(0, "a", 1), logprobs=(scored,))
    rows = as_read(writer(logprobs=True, top_logprobs=3).chunk(piece))["choices"][0]["logprobs"]
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    e = {"token": "é", "logprob": -1.5, "bytes": [0xC3, 0xA9]}
    end = {"token": "<|end|>", "logprob": -9999.0, "bytes": list(b"<|end|>")}
    assert rows == {"content": [a | {"top_logprobs": [a, e, end]}], "refusal": None}
    part = replace(chunk(0, "", 1), logprobs=(TokenLogprob(302, -1.0),))
    assert as_read(writer(logprobs=True).chunk(part))["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xC3]
    rows = as_read(writer(logprobs=True).full_response(merge_chunks([piece, piece])))["choices"][0]["logprobs"]
    assert rows["content"] == [a | {"top_logprobs": []}] * 2
    assert writer(logprobs=False).chunk(piece)["choices"][0]["logprobs"] is None


def test_token_ids_are_there_when_asked_for():
    prompt = PromptPart((1, 2), (), "")
    piece = chunk(0, "ab", 2, prompt=prompt)
    begin, rest = map(as_read, writer(return_token_ids=True).events(piece))
    assert begin["choices"][0]["prompt_token_ids"] == [1, 2] and "token_ids" not in begin["choices"][0]
    assert rest["choices"][0]["token_ids"] == [97, 98] and "prompt_token_ids" not in rest["choices"][0]
    choice = as_read(writer(return_token_ids=True).full_response([piece]))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [97, 98])
    assert "token_ids" not in json.dumps([*writer().events(piece), writer().full_response([piece])])


def test_times_are_there_when_asked_for():
    ended = chunk(0, "a", 1, FinishReason.STOP, times=Times(0.001, 0.002, 0.5))
    wanted = {"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 500.0, "cached_tokens": 0}
    assert writer(timing=True).chunk(ended)["timing"] == wanted == writer(timing=True).full_response([ended])["timing"]
    assert "timing" not in writer(timing=True).chunk(chunk(0, "a", 1)) and "timing" not in writer().chunk(ended)
