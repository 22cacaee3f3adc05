"""A stream goes on after any of its events, on any replica: `Last-Event-ID` with the same body."""

import threading
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.engine.request import FinishReason, Output, Request
from attend.model.errors import InvalidRequest
from attend.model.params import SEED_HIGH, SEED_LOW, DecodingParams, SamplingParams, StopRules
from attend.model.text.chat import ChatTemplate
from attend.model.text.grammar import GrammarSpec
from attend.service.http_api.event_ids import DIGITS, Numbering, place_of, request_digest
from attend.service.records import Chunk, Command, digest_of
from tests.conftest import examples
from tests.fakes import END, MODEL, FakeEngine, Rule, build_server, info, says, seeded
from tests.service.sse import error_of, events, joined

TEXT = "aäß漢🎉é!" * 2
BYTES = (*TEXT.encode(), END)
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"return_token_ids": True, "echo": True},
    "scores": {"logprobs": 1, "return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "usage of each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stop": {"stop": ["é!a"]},
    "resumed": {"resume_token_ids": list(BYTES[:4])},
    "prompt": {"prompt_logprobs": 0, "echo": True},
}
each = pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)


def text_of(request: Any) -> int:
    """TEXT, each character by its bytes."""
    return BYTES[min(len(request.output), len(BYTES) - 1)]


class Merging(FakeEngine):
    """Hands a request's tokens over in outputs of `burst`, as a slow reader gets them."""

    def _advance(self, request: Request, steps: int) -> list[Output]:
        outputs = super()._advance(request, steps)
        last = outputs[-1]
        tokens = tuple(token for output in outputs for token in output.token_ids)
        scores = tuple(score for output in outputs for score in output.logprobs)
        return [last._replace(token_ids=tokens, logprobs=scores, prompt_logprobs=outputs[0].prompt_logprobs)]


def asked(last: str = "", rule: Rule = text_of, burst: int = 1, path: str = "/v1/completions", **fields: Any) -> Any:
    """The answer of a replica that has just started."""
    body = {"prompt": "xy", "max_tokens": 60, "stream": True, **fields}
    server = build_server(Merging(rule, burst=burst))
    return server.post(body, path, headers={"Last-Event-ID": last} if last else {})


@each
@pytest.mark.parametrize(("burst", "other"), [(1, 4), (3, 1), (2, 3)])
def test_a_stream_goes_on_after_any_event_as_if_it_had_not_ended(fields, burst, other):
    """`burst` and `other` are how many tokens an event has, then and when it goes on."""
    whole = events(asked(burst=burst, **fields, seed=3).content)
    documents = [document for _, document in whole]
    for place, (last, _) in [*enumerate(whole[:-1], start=1)][:: 1 if burst > 1 else 4]:
        rest = events(asked(last, burst=other, **fields).content)
        assert joined([*documents[:place], *(document for _, document in rest)]) == joined(documents), last


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000), st.booleans())
def test_no_byte_at_which_a_stream_breaks_shows(first, second, drawn):
    """A client that knows server-sent events and nothing of this server, whose streams break twice. Without a seed of its own
    the answer is drawn with the server's, again.
    """
    fields = {"return_token_ids": True, "max_tokens": 12, **({} if drawn else {"seed": 5})}
    uncut = asked(rule=seeded, **fields)
    documents, rest, last = [], uncut.content, ""
    size = len(uncut.content)
    for cut in (first % size, second % size, size):
        for last, document in events(rest[:cut].rpartition(b"\n\n")[0] + b"\n\n"):  # noqa: B007 - the last one goes back
            documents.append(document)
        if last is None or documents[-1:] == ["[DONE]"]:
            break
        rest = asked(last or "", rule=seeded, **fields).content if last else uncut.content
    assert joined(documents) == joined([document for _, document in events(uncut.content)])


def test_the_id_of_the_last_token_leaves_nothing_but_the_end():
    *_, (last, _), _ = events(asked(seed=3).content)
    assert last.endswith("!")
    assert asked(last).content == b"data: [DONE]\n\n"


def test_an_id_says_seed_weights_and_tokens_in_a_few_bytes():
    ids = [last for last, _ in events(asked(seed=2**48 - 1).content)]
    digests = [digest_of(BYTES[:place]) for place in (1, 2)]
    assert ids[:2] == [f"{2**48 - 1:x}.{ids[0].split('.')[1]}.{place}.{digests[place - 1]:08x}" for place in (1, 2)]
    assert max(map(len, ids)) <= 12 + DIGITS + 2 + 3 + 9


def test_an_id_does_not_depend_on_how_many_tokens_an_event_has_nor_on_those_sent_again():
    one = {last: None for last, _ in events(asked(seed=3).content)[:-1]}
    assert set(one) >= {last for last, _ in events(asked(seed=3, burst=3).content)[:-1]}
    assert [*one][5:] == [last for last, _ in events(asked(seed=3, resume_token_ids=list(BYTES[:5])).content)][:-1]


def test_tokens_that_are_sent_again_are_digested_where_the_body_is_read(monkeypatch):
    """A long body is read beside the event loop, before anything is known of how many tokens the context has."""
    threads = []

    def watched(ids: Any, before: int = 0) -> int:
        if len(ids) > 1000:
            threads.append(threading.current_thread())
        return digest_of(ids, before)

    monkeypatch.setattr("attend.service.http_api.event_ids.digest_of", watched)
    answer = asked(resume_token_ids=[1] * 5000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resume_token_ids")
    assert threads and threading.main_thread() not in threads


@given(st.integers(SEED_LOW, SEED_HIGH), st.integers(0, 10**8), st.booleans())
def test_an_id_comes_back_as_what_it_said(seed, tokens, ended):
    numbering = Numbering("0123ab")
    chunk = Chunk(0, "", (7, 2**32 - 1), tokens, 1, seed, "stop" if ended else None)
    line = numbering.start(seed) + numbering.end(chunk)
    assert line.endswith(b"\n")
    place = place_of([line.decode().removeprefix("id: ").strip()])
    assert (place.seed, place.digest) == (seed, "0123ab")
    assert (place.shown_prefix.num_tokens, place.shown_prefix.has_ended) == (tokens, ended)
    assert place.shown_prefix.digest == digest_of((7, 2**32 - 1))


@pytest.mark.parametrize(
    "value",
    [
        "7",
        "1.abcdef",
        "1.abcdef.3",
        "1.abcdef.-3.01234567",
        "8000000000000000.abcdef.1.01234567",
        "1.ABCDEF.1.01234567",
        "x" * 9000,
    ],
)
def test_a_header_that_is_no_id_of_ours_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="Last-Event-ID must be the id of an event") as caught:
        place_of([value])
    assert caught.value.field == "Last-Event-ID" and len(str(caught.value)) < 400
    assert place_of([]) is place_of([""]) is None
    with pytest.raises(InvalidRequest):
        place_of(["1.abcdef.1.01234567", "1.abcdef.2.01234567"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two answers": ({"n": 2}, "this request asks for 2"),
    "two prompts": ({"prompt": ["x", "y"]}, "this request asks for 2"),
    "no stream": ({"stream": False}, "no stream: true"),
    "another seed": ({"seed": 4}, "has the seed 4"),
    "fewer tokens": ({"max_tokens": 4}, "after 0 to 4 tokens"),
    "more received": ({"resume_token_ids": list(BYTES[:9])}, "after 9 to 60 tokens"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_what_would_be_another_answer_is_refused_by_the_headers_name(fields, message):
    last, _ = events(asked(seed=3).content)[5]
    error = asked(last, **fields).json()["error"]
    assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_value")
    assert message in error["message"]


def test_other_weights_do_not_go_on():
    last, _ = events(asked(seed=3).content)[5]
    server = build_server(FakeEngine(info=info(fingerprint="fp_other")))
    answer = server.post({"prompt": "xy", "stream": True}, headers={"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert "another system_fingerprint than fp_other" in answer.json()["error"]["message"]


def other(request: Any) -> int:
    """TEXT, but for its eighth byte."""
    return ord("?") if len(request.output) == 7 else text_of(request)


@each
def test_a_beginning_that_is_made_again_as_another_one_ends_in_an_error_and_never_in_its_text(fields):
    whole = [last for last, document in events(asked(burst=2, **fields, seed=3).content) if document != "[DONE]"]
    same, changed = whole[0], (whole[3], whole[-1])
    assert "error" not in asked(same, other, **fields).text
    for last in changed:
        answer = asked(last, other, **fields)
        assert answer.status_code == 200
        error, done = events(answer.content)
        assert (error[1]["error"]["code"], done[1]) == ("answer_changed", "[DONE]"), last


def test_an_answer_that_ends_before_its_beginning_was_made_again_has_changed():
    last, _ = events(asked(seed=3).content)[9]
    assert events(asked(last, says("aäß")).content)[0][1]["error"]["code"] == "answer_changed"


def test_other_tokens_sent_again_than_those_of_the_id_are_a_conflict():
    last, _ = events(asked(seed=3).content)[0]
    answer = asked(last, resume_token_ids=[ord("?")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_changed")


def test_a_changed_answer_is_counted_as_an_error():
    last, _ = events(asked(seed=3).content)[9]
    server = build_server(Merging(other))
    server.post({"prompt": "xy", "max_tokens": 60, "stream": True}, headers={"Last-Event-ID": last})
    assert server.outcomes() == {("http", "/v1/completions", "error"): 1}


class Ending(Merging):
    """Ends each request from outside when it has `at` tokens or more."""

    def __init__(self, at: int, reason: FinishReason, burst: int) -> None:
        super().__init__(text_of, burst=burst)
        self.at, self.reason = at, reason

    def _advance(self, request: Request, steps: int) -> list[Output]:
        if len(request.output) + steps >= self.at:
            self._ending[request.request_id] = self.reason
        return super()._advance(request, min(steps, self.at - len(request.output)))


def ended(last: str, at: int, reason: FinishReason, burst: int, **fields: Any) -> Any:
    """The answer of such a replica."""
    body = {"prompt": "xy", "max_tokens": 60, "stream": True, **fields}
    server = build_server(Ending(at, reason, burst))
    return server.post(body, headers={"Last-Event-ID": last} if last else {})


CODES = {FinishReason.DEADLINE: "deadline_exceeded", FinishReason.ABORT: "shutting_down"}
each_end = pytest.mark.parametrize("reason", CODES)
USAGE = {"stream_options": {"include_usage": True}}


@each_end
@pytest.mark.parametrize("burst", [1, 3, 9])
def test_a_beginning_that_is_cut_while_it_is_made_again_is_an_error_and_the_id_still_holds(reason, burst):
    """With an end in place of the error, and an id of its own, the next try would repeat what the caller has."""
    whole = events(asked(seed=3).content)
    answer = ended(whole[11][0], 9, reason, burst)
    if burst == 9:  # before the headers
        assert answer.json()["error"]["code"] == CODES[reason]
        return
    error, (_, done) = events(answer.content)
    assert (error[0], error[1]["error"]["code"], done) == (None, CODES[reason], "[DONE]")


@each_end
@pytest.mark.parametrize("burst", [1, 4, 11])
def test_an_answer_that_is_cut_right_after_its_beginning_repeats_nothing(reason, burst):
    whole = events(asked(seed=3).content)
    *rest, usage, done = events(ended(whole[10][0], 11, reason, burst, **USAGE).content)
    last, (choice,) = rest[-1][0], rest[-1][1]["choices"]
    assert (len(rest), choice["text"], choice["stop_reason"]) == (1, "�", reason)  # what it had of a character
    assert (last, usage[1]["usage"]["completion_tokens"], done[1]) == (whole[10][0] + "!", 11, "[DONE]")


@each_end
@pytest.mark.parametrize("burst", [1, 5, 7, 30])
def test_an_answer_that_a_deadline_or_a_drain_ended_does_not_go_on_after_its_end(reason, burst):
    """At its end it showed what may begin a stop string or a character: that would come twice."""
    stop = {"stop": ["äß漢?"]}
    *_, (last, end), usage, _ = events(ended("", 5, reason, 1, **stop, **USAGE).content)
    assert last.endswith(".5." + last.split(".")[3]) and last.endswith("!") and end["choices"][0]["text"] == "äß"
    rest = events(asked(last, burst=burst, **stop, **USAGE).content)
    assert [document if document == "[DONE]" else document["usage"] for _, document in rest] == [usage[1]["usage"], "[DONE]"]


def test_an_id_that_says_of_the_last_token_that_more_comes_is_not_believed():
    *_, (last, _), _ = events(asked(seed=3).content)
    assert error_of(events(asked(last.removesuffix("!")).content)) == "answer_changed"


NO_PART = {
    "n",
    "model",
    "adapter",
    "request_id",
    "caller",
    "arrival",
    "deadline_ms",
    "logprobs",
    "prompt_logprobs",
    "priority",
    "cache_salt",
}
NO_PART |= {"chat", "resume_token_ids", "shown_prefix", "embedding", "remarks", "scored_token_ids", "names"}
"""Fields of a command that an id does not depend on. The model and the adapter are in the fingerprint, and the others have no
part in the answer, or in no call whose events have ids."""
OTHER: dict[str, Any] = {
    "prompts": ("xz",),
    "sampling": SamplingParams(top_k=3),
    "stops": StopRules(stop=("?",)),
    "skip_special_tokens": False,
    "decoding": DecodingParams(allowed_token_ids=(5,)),
    "echo": True,
    "truncate_prompt_tokens": 1,
    "grammar": GrammarSpec("regex", "a"),
    "suffix": "z",
}


def test_an_id_depends_on_all_that_an_answer_depends_on():
    plain = Command(prompts=("xy",), request_id="x")
    assert {each.name for each in fields(Command)} == NO_PART | OTHER.keys()
    made = [request_digest(replace(plain, **{name: value})) for name, value in OTHER.items()]
    made += [request_digest(replace(plain, decoding=DecodingParams(allowed_token_ids=ids))) for ids in ((5, 6), (2**64 - 1,))]
    made += [request_digest(replace(plain, prompts=(prompt,))) for prompt in ("", "x" * 9000, (120, 121), (-(2**70),))]
    made.append(request_digest(plain))
    assert len({*made}) == len(made)
    assert request_digest(replace(plain, sampling=SamplingParams(seed=8), priority=9)) == request_digest(plain)


@pytest.mark.parametrize("count", [61, 999_999_999])
def test_a_count_beyond_the_answer_is_refused(count):
    seed, digest, _, crc = events(asked(seed=3).content)[4][0].split(".")
    answer = asked(f"{seed}.{digest}.{count}.{crc}")
    assert (answer.status_code, f"after 0 to 60 tokens, by resume_token_ids and max_tokens; got {count}") == (
        400,
        answer.json()["error"]["message"].partition("must be ")[2],
    )
    endless = asked(f"{seed}.{digest}.{count}.{crc}", max_tokens=None)
    assert endless.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_conversations_have_no_ids_and_refuse_one(path, stream):
    turn = [{"role": "user", "content": "x"}]
    body = {"input": "x", "store": False} if path == "/v1/responses" else {"messages": turn, "max_tokens": 60}
    server = build_server(FakeEngine(text_of), template=ChatTemplate("{{ messages[0].content }}"))
    answer = server.post(body | {"stream": stream}, path)
    assert (answer.status_code, "\nid:" in answer.text) == (200, False)
    refused = server.post(body | {"stream": stream}, path, headers={"Last-Event-ID": "1.abcdef.3.01234567"})
    assert refused.status_code == 400 and "Last-Event-ID resumes streams of /v1/completions" in refused.text


def test_streams_of_several_answers_have_no_ids():
    assert {last for last, _ in events(asked(n=2).content)} == {None}


def test_tokens_that_are_made_again_are_counted_once():
    """Each call counts what it delivered."""
    server = build_server(Merging(text_of, burst=3))
    body = {"prompt": "xy", "max_tokens": 60, "stream": True, "seed": 3}
    whole = events(server.post(body).content)
    first, (last, _) = sum_of(server), whole[3]
    rest = server.post(body, headers={"Last-Event-ID": last}).content
    assert sum_of(server) - first == len(BYTES) - 12
    assert rest.endswith(b"data: [DONE]\n\n")
    assert server.outcomes() == {("http", "/v1/completions", "stop"): 2}


def sum_of(server: Any) -> float:
    samples = [s for family in server.metrics.registry.collect() for s in family.samples]
    return sum(s.value for s in samples if s.name == "attend_generation_tokens_total" and s.labels["model"] == MODEL)
