"""OpenAI's chat: what a body may say, the prompt and the command that it makes, and the objects that answer it."""

from dataclasses import replace
from typing import Any

import pytest

from attend.model.engine.request import FinishReason, TokenLogprob
from attend.model.errors import InvalidRequest
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams, StopRules
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import TEXT_ALONE
from attend.service.contract.commands import to_command
from attend.service.contract.requests import ChatRequest
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.merging import merge_chunks
from attend.service.records import ChatRules, Chunk, Command, TokenCounts
from attend.service.remarks import Remarks
from tests.service.contract.asked import messages_of
from tests.service.contract.wrong import wrong_types
from tests.service.http_api.described import as_read

SHIPPED = ChatTemplate("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
ROLES = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.content }}|{% endfor %}{{ flag }}")
HELLO = [{"role": "user", "content": "hello"}]
VOCAB = 1000
ALONE = ChatRules(TEXT_ALONE)


def read(**body) -> ChatRequest:
    return ChatRequest.read({"messages": HELLO} | body)


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


@pytest.mark.parametrize("name", sorted({*ChatRequest.model_fields, *ChatRequest.unsupported} - {"messages"}))
def test_null_is_as_good_as_absent(name):
    assert read(**{name: None}) == read()


NOTHING = [(name, value) for name, rule in ChatRequest.unsupported.items() for value in rule.values or ()]


@pytest.mark.parametrize(("name", "value"), NOTHING)
def test_a_value_that_asks_for_nothing_is_accepted(name, value):
    assert ChatRequest.read({"messages": HELLO, name: value}, Remarks()) == read()


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
