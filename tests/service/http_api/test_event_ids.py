"""A stream goes on after any of its events, on any replica: `Last-Event-ID` with the same body."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from attend.model.engine.request import Output, Request
from attend.model.errors import InvalidRequest
from attend.model.params import SEED_HIGH, SEED_LOW
from attend.model.text.chat import ChatTemplate
from attend.service.http_api.event_ids import DIGITS, Numbering, place_of
from attend.service.records import Chunk, digest_of
from tests.fakes import END, MODEL, FakeEngine, Rule, build_server, info, says, seeded

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


def events(content: bytes) -> list[tuple[str | None, Any]]:
    """(last id, document) of each event, as the official client decodes them."""
    found = [(event.id, event.data) for event in SSEDecoder().iter_bytes(iter([content]))]
    return [(last, data if data == "[DONE]" else json.loads(data)) for last, data in found]


def joined(documents: list[Any]) -> list[Any]:
    """What events say together."""
    choices = [choice for document in documents if document != "[DONE]" for choice in document["choices"]]
    lists: dict[str, list[Any]] = {}
    for choice in choices:
        parts = {**(choice["logprobs"] or {}), **{name: choice[name] for name in choice if name.endswith("_ids")}}
        parts["prompt_logprobs"] = choice.get("prompt_logprobs") or []
        for name, values in parts.items():
            lists.setdefault(name, []).extend(values)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = [document.get("usage") for document in documents if document != "[DONE]"]
    return ["".join(choice["text"] for choice in choices), lists, ends, usage[-1:], documents[-1:]]


@each
@pytest.mark.parametrize(("burst", "other"), [(1, 4), (3, 1), (2, 3)])
def test_a_stream_goes_on_after_any_event_as_if_it_had_not_ended(fields, burst, other):
    """`burst` and `other` are how many tokens an event has, then and when it goes on."""
    whole = events(asked(burst=burst, **fields, seed=3).content)
    documents = [document for _, document in whole]
    for place, (last, _) in [*enumerate(whole[:-1], start=1)][:: 1 if burst > 1 else 4]:
        rest = events(asked(last, burst=other, **fields).content)
        assert joined([*documents[:place], *(document for _, document in rest)]) == joined(documents), last


@settings(max_examples=40, deadline=None)
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


@given(st.integers(SEED_LOW, SEED_HIGH), st.integers(0, 10**8), st.booleans())
def test_an_id_comes_back_as_what_it_said(seed, tokens, ended):
    numbering = Numbering("fp_some")
    chunk = Chunk(0, "", (7, 2**32 - 1), tokens, 1, seed, "stop" if ended else None)
    line = numbering.start(seed) + numbering.end(chunk)
    assert line.endswith(b"\n")
    place = place_of([line.decode().removeprefix("id: ").strip()])
    assert (place.seed, place.shown.num_tokens, place.ended) == (seed, tokens, ended)
    assert place.shown.digest == digest_of((7, 2**32 - 1))


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
    last, _ = events(asked(seed=3, max_tokens=1).content)[0]
    answer = asked(last, resume_token_ids=[ord("?")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_changed")


def test_a_changed_answer_is_counted_as_an_error():
    last, _ = events(asked(seed=3).content)[9]
    server = build_server(Merging(other))
    server.post({"prompt": "xy", "max_tokens": 60, "stream": True}, headers={"Last-Event-ID": last})
    assert server.outcomes() == {("http", "/v1/completions", "error"): 1}


def test_streams_of_several_answers_and_of_chats_have_no_ids_and_a_chat_refuses_one():
    assert {last for last, _ in events(asked(n=2).content)} == {None}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "stream": True}
    server = build_server(FakeEngine(text_of), template=ChatTemplate("{{ messages[0].content }}"))
    assert b"\nid:" not in server.post(body, "/v1/chat/completions").content
    refused = server.post(body, "/v1/chat/completions", headers={"Last-Event-ID": "1.abcdef.3.01234567"})
    assert refused.json()["error"]["param"] == "Last-Event-ID"


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
