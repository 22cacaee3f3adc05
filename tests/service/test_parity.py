"""One table of cases on both transports: the same texts, ends and counts, or the same words; only the wire differs."""

import json
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from attend.model.errors import EngineFailed, Overloaded, Unavailable
from attend.model.text.mask import DEAD_END
from attend.service.errors import INTERNAL, TABLE
from attend.v1 import generation_pb2 as pb
from tests.fakes import FakeEngine, Server, build_server, byte_tokenizer, says, seeded
from tests.service.messages import generate_message
from tests.service.sse import events_of

TIMES = ("queue_ms", "prefill_ms", "decode_ms")


@dataclass(frozen=True)
class Outcome:
    """What a call came to, in the words of neither transport."""

    answers: tuple[tuple[Any, ...], ...] = ()
    prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_scores: tuple[dict[int, float], ...] = ()
    timing: tuple[float, ...] = ()
    seed: int | None = None
    fingerprint: str = ""
    status: int = 200
    message: str = ""


def joined(pieces: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Pieces (index, text, ids, scores, reason, stop) of all answers as one (text, ids, scores, reason, stop) for each."""
    answers = []
    for index in sorted({piece[0] for piece in pieces}):
        mine = [piece for piece in pieces if piece[0] == index]
        text, ids = "".join(piece[1] for piece in mine), tuple(token for piece in mine for token in piece[2])
        answers.append((text, ids, [score for piece in mine for score in piece[3]], *mine[-1][4:]))
    return tuple(answers)


def scores_of(choice: dict[str, Any]) -> list[tuple[float, dict[str, float]]]:
    """The log probability of each token of the answer, and of those that HTTP tells of beside it."""
    lists, count = choice["logprobs"], len(choice["token_ids"])
    pairs = list(zip(lists["token_logprobs"], lists["top_logprobs"], strict=True)) if lists else []
    return pairs[len(pairs) - count :]


def over_http(server: Server, body: dict[str, Any], *, stream: bool) -> Outcome:
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer: httpx.Response = server.post(body | more)
    if answer.status_code != 200:
        return Outcome(status=answer.status_code, message=answer.json()["error"]["message"])
    events = [answer.json()] if not stream else events_of(answer.text)
    pieces = [
        (c["index"], c["text"], c["token_ids"], scores_of(c), c["finish_reason"], c["stop_reason"])
        for event in events
        for c in event["choices"]
    ]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == sum(len(piece[2]) for piece in pieces) + len(body.get("resume_token_ids", []))
    first = events[0]["choices"][0]
    rows = [{int(key): each["logprob"] for key, each in row.items()} for row in first.get("prompt_logprobs", [])[1:]]
    times = [tuple(event["timing"][name] for name in TIMES) for event in events if "timing" in event]
    return Outcome(
        joined(pieces),
        usage["prompt_tokens"],
        tuple(first["prompt_token_ids"]),
        tuple(rows),
        times[-1] if times else (),
        events[0]["seed"],
        events[0]["system_fingerprint"],
    )


def scored_output(output: pb.Output) -> list[tuple[float, dict[str, float]]]:
    """What HTTP would tell of the tokens of an output."""
    tops = list(output.top_logprobs) or [pb.TopLogprobs()] * len(output.logprobs)
    scores = []
    for token, value, top in zip(output.token_ids, output.logprobs, tops, strict=False):
        others = {shown(other): score for other, score in zip(top.token_ids, top.logprobs, strict=True)}
        scores.append((value, {shown(token): value} | others))
    return scores


def shown(token: int) -> str:
    return byte_tokenizer().decode([token], skip_special_tokens=False)


def over_grpc(server: Server, body: dict[str, Any], *, stream: bool) -> Outcome:
    try:
        responses = server.rpc("GenerateStream" if stream else "Generate", generate_message(body))
    except grpc.aio.AioRpcError as error:
        status = {row.code: row.status for row in [*TABLE.values(), INTERNAL]}
        by_code = {row.grpc: status[row.code] for row in [*TABLE.values(), INTERNAL] if row.status not in (413, 415, 507)}
        return Outcome(status=by_code[error.code()], message=error.details())
    pieces = []
    for output in (output for response in responses for output in response.outputs):
        end = output.finish_info
        reason = pb.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower()
        stop = getattr(end, end.WhichOneof("stop")) if end.WhichOneof("stop") else None
        ended = reason if output.HasField("finish_info") else None
        pieces.append((output.index, output.text, output.token_ids, scored_output(output), ended, stop))
    first, told = responses[0], responses[0].prompt_info
    rows = [
        dict(zip(top.token_ids, top.logprobs, strict=True)) | {token: value}
        for token, value, top in zip(told.token_ids, told.logprobs, told.top_logprobs, strict=False)
    ]
    times = [tuple(getattr(each.timing, name) for name in TIMES) for each in responses if each.HasField("timing")]
    return Outcome(
        joined(pieces),
        told.num_prompt_tokens,
        tuple(told.token_ids),
        tuple(rows[1:]),
        times[-1] if times else (),
        first.seed,
        first.system_fingerprint,
    )


VALID: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": ""},
    {"prompt": "naïve café 😀"},
    {"prompt": "\0"},
    {"prompt": [1, 2, 256]},
    {"prompt": "a", "max_tokens": 1},
    {"prompt": "a", "max_tokens": 127},
    {"prompt": "a", "n": 8},
    {"prompt": "a", "temperature": 0.0},
    {"prompt": "a", "temperature": 2.0, "top_p": 0.5, "top_k": 3, "min_p": 1.0},
    {"prompt": "a", "top_k": -1},
    {"prompt": "a", "top_k": 2**31 - 1},
    {"prompt": "a", "seed": -(2**63)},
    {"prompt": "a", "seed": 2**63 - 1, "n": 2},
    {"prompt": "a", "stop": ["d"]},
    {"prompt": "a", "stop": ["efg", "cd"], "n": 2},
    {"prompt": "a", "stop": ["cd"], "include_stop_str_in_output": True},
    {"prompt": "a", "stop": ["never"]},
    {"prompt": "a", "stop": ["b"], "min_tokens": 3},
    {"prompt": "a", "stop_token_ids": [100]},
    {"prompt": "a", "stop_token_ids": [100], "include_stop_str_in_output": True},
    {"prompt": "a", "stop_token_ids": [99, 105], "min_tokens": 4},
    {"prompt": [253]},
    {"prompt": [253], "ignore_eos": True},
    {"prompt": [253], "ignore_eos": True, "skip_special_tokens": False},
    {"prompt": "a", "deadline_ms": 60_000},
    {"prompt": "a", "request_id": "mine.7"},
    {"prompt": "a", "model": "fake"},
    {"prompt": "a", "model": ""},
    {"prompt": "a", "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"prompt": "a", "echo": False, "timing": False},
    {"prompt": "a", "timing": True, "n": 2},
    {"prompt": "a", "timing": True, "stop": ["d"]},
    {"prompt": "naïve 😀", "echo": True},
    {"prompt": "", "echo": True},
    {"prompt": [97, 256, 0xC3], "echo": True, "n": 2},
    {"prompt": "abc", "logprobs": 0},
    {"prompt": "abc", "logprobs": 5, "n": 2, "stop": ["ef"]},
    {"prompt": "abc", "logprobs": 2, "echo": True, "prompt_logprobs": 2},
    {"prompt": "abc", "prompt_logprobs": 0},
    {"prompt": "abc", "prompt_logprobs": 20, "n": 2},
    {"prompt": "abc", "max_tokens": 0, "echo": True},
    {"prompt": "abc", "max_tokens": 0, "prompt_logprobs": 3},
    {"prompt": "a" * 128, "max_tokens": 0, "echo": True, "prompt_logprobs": 0},
    {"prompt": "abcde", "truncate_prompt_tokens": 2, "echo": True},
    {"prompt": "a" * 300, "truncate_prompt_tokens": 3},
    {"prompt": "a", "cache_salt": "salt"},
    {"prompt": "a", "priority": 0},
    {"prompt": "a", "priority": 9},
    {"prompt": "a", "presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 2.0},
    {"prompt": "a", "logit_bias": {"0": -100.0, "256": 100.0}},
    {"prompt": "a", "logit_bias": {}},
    {"prompt": "a", "allowed_token_ids": [0, 256]},
    {"prompt": "a", "bad_words": ["x", " y"]},
    {"prompt": "a", "resume_token_ids": [98, 99], "logprobs": 1},
    {"prompt": "a", "resume_token_ids": [98, 99], "stop": ["cde"]},
]
INVALID: list[dict[str, Any]] = [  # the others are in refused.py
    {"prompt": "a", "temperature": 2.5},
    {"prompt": "a", "resume_token_ids": [98, 99], "stop": ["bc"]},
]
SEED = {"seed": 12, "return_token_ids": True}
ids = [json.dumps(case)[:60] for case in VALID + INVALID]


def four(body: dict[str, Any], make_engine) -> list[Outcome]:
    """The outcome whole and streamed, over HTTP and over gRPC, each on a server of its own."""
    calls = (over_http, over_grpc)
    return [call(build_server(make_engine()), body, stream=stream) for call in calls for stream in (False, True)]


@pytest.mark.parametrize("body", VALID, ids=ids[: len(VALID)])
def test_a_call_gives_the_same_answer_on_both_transports_whole_and_streamed(body):
    for make_engine in (FakeEngine, lambda: FakeEngine(seeded, burst=3)):
        http, *others = four(SEED | body, make_engine)
        assert http.status == 200, http.message
        assert len(http.answers) == body.get("n", 1)
        assert all(reason in ("stop", "length") for *_, reason, _ in http.answers)
        assert bool(http.timing) == body.get("timing", False)
        assert others == [http] * 3


@pytest.mark.parametrize("body", INVALID, ids=ids[len(VALID) :])
def test_a_mistake_is_told_in_the_same_words_on_both_transports(body):
    http, *others = four(body, FakeEngine)
    assert http.status in (400, 404)
    assert http.message
    assert others == [http] * 3


@pytest.mark.parametrize("text", ["naïve café 日本語 😀", "", "x"])
def test_text_is_the_same_on_both_transports(text):
    http, *others = four({"prompt": "a", "max_tokens": 60} | SEED, lambda: FakeEngine(says(text)))
    assert http.answers == ((text, (*text.encode(), 256), [], "stop", None),)
    assert others == [http] * 3


@pytest.mark.parametrize(
    "error", [Overloaded("the queue is full"), Unavailable("draining"), EngineFailed("secret"), ZeroDivisionError("secret")]
)
def test_a_refusal_is_told_in_the_same_words_on_both_transports(error):
    def make_engine() -> FakeEngine:
        engine = FakeEngine()
        engine.refusal = error
        return engine

    outcomes = four({"prompt": "a", "request_id": "mine"}, make_engine)
    assert {outcome.status for outcome in outcomes} == {TABLE.get(type(error), INTERNAL).status}
    # Over HTTP the id of a failed call is that of its header, which Serve sends back.
    assert len({outcome.message.partition("; request id")[0] for outcome in outcomes}) == 1


def test_a_deadline_before_the_first_token_is_told_in_the_same_words():
    http, *others = four({"prompt": "a", "deadline_ms": 1}, lambda: FakeEngine(held=True))
    assert http.status == 504
    assert others == [http] * 3


@pytest.mark.parametrize("after", [0, 2])
def test_a_dead_end_of_a_grammar_is_told_as_such_on_both_transports(after):
    def stuck() -> Server:
        engine = FakeEngine()
        engine.broken_after, engine.error = after, DEAD_END
        return build_server(engine)

    told = Outcome(status=400, message=DEAD_END)
    assert over_http(stuck(), {"prompt": "a"}, stream=False) == told
    assert [over_grpc(stuck(), {"prompt": "a"}, stream=stream) for stream in (False, True)] == [told] * 2
    said = stuck().post({"prompt": "a", "stream": True}).text
    error = json.loads(next(line for line in said.split("\n") if '"error"' in line).removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == (DEAD_END, "invalid_request_error")
