"""Nothing that a command says is lost on its way to the engine. A new field fails here until it is said where it goes."""

import asyncio
from contextlib import aclosing
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from attend.model.engine.request import Request
from attend.model.params import DecodingParams, SamplingParams, StopRules
from attend.model.pooling import EmbeddingRules, Pooling
from attend.model.text.grammar import GrammarSpec
from attend.service.access.caller import BATCH_WEIGHT, BATCHES, Caller
from attend.service.access.quota import Key, Limits, Share
from attend.service.records import Command
from tests.fakes import END, FakeEngine, build_server

PLAIN = Command(prompts=("abcd",), sampling=SamplingParams(seed=5), stops=StopRules(max_tokens=4), request_id="plain")
SAMPLING = SamplingParams(temperature=0.5, top_k=3, top_p=0.75, min_p=0.125, seed=6)
DECODING = DecodingParams(presence_penalty=0.5, bad_words=("x",))

ANN = Caller(Key("ann", Limits(), share=Share(weight=2.5)))
OF_A_BATCH = {"owner": BATCHES, "weight": BATCH_WEIGHT, "cache_salt": "key ann\0", "is_background": True, "priority": 0}
"""What a line of a batch changes in the request, whoever sent the batch."""

Changes = dict[str, Any]
CARRIED: dict[str, tuple[Changes, Changes]] = {
    "prompts": ({"prompts": ((120, 121),)}, {"prompt": [120, 121]}),
    "sampling": ({"sampling": SAMPLING}, {"sampling": SAMPLING, "seed": 6}),
    "decoding": ({"decoding": DECODING}, {"decoding": DECODING, "bad_words": [[*b"x"], [*b" x"]]}),
    "logprobs": ({"logprobs": 2}, {"logprobs": 2}),
    "prompt_logprobs": ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 2}, {"prompt": [*b"cd"]}),
    "priority": ({"priority": 7}, {"priority": 7}),
    "cache_salt": ({"cache_salt": "mine"}, {"cache_salt": "\0mine"}),
    "caller": (
        {"caller": ANN},
        {"owner": "ann", "weight": 2.5, "cache_salt": "key ann\0"},
    ),
    "embedding": ({"embedding": EmbeddingRules(Pooling.MEAN)}, {"pooling": Pooling.MEAN}),
    "scored_token_ids": ({"logprobs": 0, "scored_token_ids": (5, 9)}, {"logprobs": 0, "scored_token_ids": (5, 9)}),
    "resume_token_ids": ({"resume_token_ids": (98, 99)}, {"output": [98, 99]}),
}
"""What a changed field of Command changes in the engine's Request."""
STOPS: dict[str, tuple[StopRules, Changes]] = {
    "max_tokens": (StopRules(max_tokens=7), {"max_tokens": 7}),
    "min_tokens": (StopRules(max_tokens=4, min_tokens=2), {"min_tokens": 2}),
    "stop_token_ids": (StopRules(max_tokens=4, stop_token_ids=(7,)), {"stop_token_ids": frozenset([7, END])}),
    "ignore_eos": (StopRules(max_tokens=4, ignore_eos=True), {"stop_token_ids": frozenset()}),
}
ELSEWHERE = {
    "stops": "each of its rules, below",
    "n": "so many requests, which are the choices from 0 on, below",
    "grammar": "a matcher of the request's own, below",
    "adapter": "the adapter of this name, as an object: test_adapters.py",
    "model": "refused where it is not the served one: test_generation.py",
    "arrival": "in whose turn it is prepared, and its deadline: test_reading.py",
    "request_id": "in the log and in headers; the engine's ids are unique: test_generation.py",
    "deadline_ms": "an alarm that ends the requests: test_generation.py",
    "skip_special_tokens": "the answer's text: test_text.py",
    "echo": "the answer's text: tests/simulation/callers.py",
    "suffix": "the prompt's text: generation/test_infill.py",
    "remarks": "the answer's headers: test_tolerance.py",
    "names": "what an error calls a prompt: generation/test_score.py",
    "chat": "the parts of the answer, and a grammar where calls are enforced: test_chat_answers.py",
}
STOPS_ELSEWHERE = {"stop": "the answer's text: test_text.py", "include_stop_str_in_output": "the answer's text: test_text.py"}
OF_THE_SCHEDULER = {
    *(
        "prompt_scores",
        "num_computed",
        "tables",
        "reserved_tokens",
        "num_known",
        "parent",
        "lookup",
        "num_cached",
        "finish_reason",
    ),
    *(
        "arrived_at",
        "scheduled_at",
        "first_token_at",
        "virtual_arrival",
        "num_preemptions",
        "num_left_out",
        "lack",
        "history",
        "_plan",
    ),
    *("hidden_sum", "num_summed", "version", "num_replayed", "slot", "snapshot_at", "last_snapshot", "known_until"),
    *("awaits", "was_newcomer"),
}


class Refusing(FakeEngine):
    """Keeps each request as the service made it, and answers none."""

    async def generate(self, requests, at_once=None):
        self.requests += requests
        raise NotImplementedError
        yield


def requests_of(command: Command) -> list[Request]:
    """What the service asks of the engine."""
    engine = Refusing()

    async def run() -> None:
        server = build_server(engine)
        record = server.metrics.open("http", "/v1/completions")
        async with aclosing(server.service.generate(command, record, adapter=server.service.adapter_of(command))) as stream:
            async for _ in stream:
                pass

    with pytest.raises(NotImplementedError):
        asyncio.run(run())
    return engine.requests


def changed(before: Request, after: Request) -> Changes:
    """The fields in which a request differs from another, with its values."""
    values = {field.name: getattr(after, field.name) for field in fields(Request)}
    return {name: value for name, value in values.items() if value != getattr(before, name) and name != "request_id"}


def test_it_is_said_of_every_field_where_it_goes():
    said = CARRIED.keys() | ELSEWHERE.keys()
    assert {field.name for field in fields(Command)} == said, "CARRIED or ELSEWHERE says where each field of Command goes"
    assert {field.name for field in fields(StopRules)} == STOPS.keys() | STOPS_ELSEWHERE.keys()
    assert not CARRIED.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", CARRIED)
def test_a_field_of_the_command_reaches_the_engines_request_and_changes_nothing_else_there(name):
    given, expected = CARRIED[name]
    assert name in given
    (before,), (after,) = requests_of(PLAIN), requests_of(replace(PLAIN, **given))
    assert changed(before, after) == expected


def test_a_line_of_a_batch_runs_in_the_turn_of_all_batches_and_shares_prefixes_with_its_key():
    (before,), (after,) = requests_of(PLAIN), requests_of(replace(PLAIN, caller=replace(ANN, is_batch=True)))
    assert changed(before, after) == OF_A_BATCH


@pytest.mark.parametrize("name", STOPS)
def test_a_rule_for_the_end_reaches_the_engines_request_and_changes_nothing_else_there(name):
    stops, expected = STOPS[name]
    (before,), (after,) = requests_of(PLAIN), requests_of(replace(PLAIN, stops=stops))
    assert changed(before, after) == expected


def test_several_answers_are_the_choices_from_0_on():
    first, second = requests_of(replace(PLAIN, n=2))
    assert (first.answer_index, changed(first, second)) == (0, {"answer_index": 1})


def test_each_answer_has_a_matcher_of_its_own():
    first, second = requests_of(replace(PLAIN, n=2, grammar=GrammarSpec("choice", '["ab", "cd"]')))
    assert first.grammar is not second.grammar
    first.grammar.advance(ord("a"))
    assert [second.grammar.allows(token) for token in (*b"acb", END)] == [True, True, False, False]
    assert [first.grammar.allows(token) for token in (*b"acb", END)] == [False, False, True, False]


def test_every_field_that_the_caller_of_the_engine_fills_is_filled_by_something():
    """The rest is the scheduler's, and fresh."""
    filled = {name for _, expected in (*CARRIED.values(), *STOPS.values()) for name in expected} | OF_A_BATCH.keys()
    names = {field.name for field in fields(Request)}
    of_the_model = {"banned_tokens"}
    assert names == filled | of_the_model | {"request_id", "answer_index", "grammar", "adapter"} | OF_THE_SCHEDULER
    (request,) = requests_of(PLAIN)
    for field in fields(Request):
        if field.name in OF_THE_SCHEDULER:
            fresh = field.default if field.default is not MISSING else field.default_factory()
            assert getattr(request, field.name) == fresh
