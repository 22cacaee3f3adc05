"""One table of chats on both transports, whole and streamed: the same message, end and counts, or the same words."""

import json
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from attend.service.errors import INTERNAL, TABLE
from attend.v1 import generation_pb2 as pb
from tests.fakes import Server, build_server
from tests.service.messages import chat_message
from tests.service.test_chat_answers import CALL, NOW, server

USER = {"role": "user", "content": "Time?"}
CUT = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "U'}}
"""As max_tokens leaves it."""
CALLED = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
LOOP = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "12"},
]
FIXED = {"request_id": "r1", "seed": 5, "messages": [USER], "tools": [NOW], "max_tokens": 500, "return_token_ids": True}


@dataclass
class Outcome:
    """What a chat came to, in the words of neither transport."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """By index: the id, the name, the arguments."""
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None
    counts: tuple[int, int, int] = (0, 0, 0)
    """Tokens of the prompt, the answer, and its reasoning."""
    facts: tuple[Any, ...] = ()
    status: int = 200
    words: str = ""

    def take(self, index: int, number: str, name: str, arguments: str) -> None:
        """A piece of a call."""
        call = self.calls.setdefault(index, ["", "", ""])
        for place, text in enumerate((number, name, arguments)):
            call[place] += text


def over_http(one: Server, body: dict[str, Any], *, stream: bool) -> Outcome:
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = one.post(body | more, "/v1/chat/completions")
    if answer.status_code != 200:
        return Outcome(status=answer.status_code, words=answer.json()["error"]["message"])
    events = [answer.json()] if not stream else [json.loads(part[6:]) for part in answer.text.split("\n\n")[:-2]]
    found = Outcome(facts=(events[0]["seed"], events[0]["system_fingerprint"]))
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta" if stream else "message"]
        found.content += delta.get("content") or ""
        found.reasoning += delta.get("reasoning_content") or ""
        for place, call in enumerate(delta.get("tool_calls", ())):
            function = call["function"]
            found.take(call.get("index", place), call.get("id", ""), function.get("name", ""), function["arguments"])
        found.tokens += choice.get("token_ids", [])
        found.reason, found.stop = choice["finish_reason"] or found.reason, choice["stop_reason"]
    usage = events[-1]["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    found.counts = (usage["prompt_tokens"], usage["completion_tokens"], reasoning)
    return found


def over_grpc(one: Server, body: dict[str, Any], *, stream: bool) -> Outcome:
    try:
        responses = one.rpc("ChatStream" if stream else "Chat", chat_message(body))
    except grpc.aio.AioRpcError as error:
        statuses = {row.grpc: row.status for row in [INTERNAL, *TABLE.values()] if row.status in (400, 404, 500)}
        return Outcome(status=statuses[error.code()], words=error.details())
    found = Outcome(facts=(responses[0].seed, responses[0].system_fingerprint))
    for output in (output for response in responses for output in response.outputs):
        found.content += output.text
        found.reasoning += output.reasoning
        for call in output.tool_calls:
            found.take(call.index, call.id, call.name, call.arguments)
        found.tokens += output.token_ids
        found.counts = (responses[0].prompt_info.num_prompt_tokens, output.num_tokens, output.num_reasoning_tokens)
        end = output.finish_info
        if output.HasField("finish_info"):
            found.reason = pb.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower()
            found.stop = getattr(end, end.WhichOneof("stop")) if end.WhichOneof("stop") else None
    return found


THOUGHT = "<think>\nLet me see.\n</think>\n\nI look.\n"
VALID: list[tuple[str, dict[str, Any]]] = [
    ("Noon.", {}),
    ("", {}),
    ("naïve 😀 日本", {"tools": []}),
    (CALL, {}),
    (CALL + "\n" + CALL, {}),
    (CALL + "\n" + CALL, {"parallel_tool_calls": False}),
    (THOUGHT + CALL + "\n" + CALL, {}),
    (THOUGHT + "Noon.", {"tools": []}),
    (CALL, {"tool_choice": "none"}),
    ("Hm.</think>Noon.", {"chat_template_kwargs": {"think": True}}),
    (THOUGHT + CALL, {"max_tokens": 12}),
    (THOUGHT + CALL, {"max_tokens": 80}),
    (THOUGHT + CALL, {"stop": ["look"]}),
    (CALL, {"stop": ["UTC"]}),
    ("a <tool_call> b", {}),
    ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', {}),
    ("Noon.", {"messages": LOOP}),
    ("Noon.", {"messages": [LOOP[0], LOOP[1] | {"tool_calls": [CUT]}, LOOP[2]]}),
    ("Noon.", {"messages": [*LOOP[:1], LOOP[1] | {"reasoning_content": "Hm."}, LOOP[2], USER]}),
    ("Noon.", {"messages": [{"role": "developer", "content": "Be brief."}, USER | {"name": "Ann"}]}),
]
INVALID: list[dict[str, Any]] = [  # the others are in refused_chats.py
    {"messages": [{"role": "robot", "content": "a"}]},
    {"tools": [NOW, NOW]},
    {"tool_choice": "required", "min_tokens": 3},
]


def four(text: str, body: dict[str, Any]) -> list[Outcome]:
    """The outcome whole and streamed, over HTTP and over gRPC, each on a server of its own."""
    calls = (over_http, over_grpc)
    return [call(server(text), FIXED | body, stream=stream) for call in calls for stream in (False, True)]


@pytest.mark.parametrize(("text", "body"), VALID)
def test_a_chat_gives_the_same_answer_on_both_transports_whole_and_streamed(text, body):
    http, *others = four(text, body)
    assert http.status == 200, http.words
    assert http.tokens
    assert others == [http] * 3


@pytest.mark.parametrize("body", INVALID, ids=[json.dumps(body)[:60] for body in INVALID])
def test_a_mistake_in_a_chat_is_told_in_the_same_words_on_both_transports(body):
    http, *others = four("", body)
    assert http.status in (400, 404)
    assert http.words
    assert others == [http] * 3


def refusal(one: Server, **fields: Any) -> grpc.aio.AioRpcError:
    """How a chat over gRPC is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        one.rpc("Chat", pb.ChatRequest(**fields))
    return caught.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response": pb.ResponseOptions(echo=True)}, "echo is not for a chat"),
        ({"response": pb.ResponseOptions(prompt_logprobs=0)}, "prompt_logprobs is not for a chat"),
        ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools[0].parameters must be a JSON object in a string"),
        ({"tools": [pb.Tool(name="f", parameters=" " * 300_000)]}, "tools may have schemas of at most 262144 bytes in all"),
        ({"chat_template_kwargs": "[]"}, "chat_template_kwargs must be a JSON object in a string"),
    ],
)
def test_what_grpc_alone_can_get_wrong_is_named(fields, words):
    error = refusal(server(""), messages=[pb.ChatMessage(role="user", content="a")], **fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()


def test_a_model_without_a_chat_template_says_so():
    assert "has no chat template: use Generate" in refusal(build_server(), messages=[pb.ChatMessage(role="user")]).details()
