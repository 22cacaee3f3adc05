"""The service between the transports and the engine: what it asks of the engine, and what it makes of the answer."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import chain

import pytest

from attend.model.engine.request import NO_TOKEN_LEFT, FinishReason
from attend.model.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from attend.model.params import DecodingParams, SamplingParams, StopRules
from attend.model.text.mask import DEAD_END, TOO_COMPLEX
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.merging import merge_chunks
from attend.service.records import Chunk, Command
from tests.fakes import CONTEXT, END, FakeEngine, Server, build_server, byte_tokenizer, info, says, seeded, successor, until

FIELDS = {"decoding", "logprobs", "prompt_logprobs", "echo", "truncate_prompt_tokens", "resume_token_ids"}


def command(*prompts, n: int = 1, seed: int | None = None, model: str = "", deadline_ms=None, skip=True, **rules) -> Command:
    more = {name: rules.pop(name) for name in FIELDS & rules.keys()}
    return Command(
        prompts=prompts or ("a",),
        sampling=SamplingParams(seed=seed),
        stops=StopRules(**{"max_tokens": 4} | rules),
        n=n,
        model=model,
        request_id="test",
        deadline_ms=deadline_ms,
        skip_special_tokens=skip,
        **more,
    )


async def batches(server: Server, asked: Command, seen: list[list[Chunk]]) -> None:
    record = server.metrics.open("http", "/v1/completions", asked.request_id)
    async with aclosing(server.service.generate(asked, record, adapter=server.service.adapter_of(asked))) as stream:
        async for chunks in stream:
            seen.append(chunks)


def generate(engine: FakeEngine, asked: Command) -> list[Chunk]:
    """The answers, whole, in the order of their indices."""
    seen: list[list[Chunk]] = []
    asyncio.run(batches(build_server(engine), asked, seen))
    return merge_chunks(chunk for chunks in seen for chunk in chunks)


def test_a_stop_string_ends_the_engines_request_and_drops_what_came_after_it():
    engine = FakeEngine(says("one STOP two"), burst=9)
    (chunk,) = generate(engine, command(max_tokens=50, stop=("STOP",)))
    assert (chunk.text, chunk.stop, chunk.finish_reason) == ("one ", "STOP", FinishReason.STOP)
    assert chunk.num_tokens == len("one STOP")
    assert engine.aborted[0] == (engine.requests[0].request_id, FinishReason.STOP)
    assert not engine.open


def test_the_same_command_gives_the_same_tokens_and_the_reported_seed_gives_them_again():
    first = generate(FakeEngine(seeded), command(n=2, seed=5))
    assert first == generate(FakeEngine(seeded), command(n=2, seed=5))
    assert first != generate(FakeEngine(seeded), command(n=2, seed=6))
    (chosen,) = generate(FakeEngine(seeded), command())
    (again,) = generate(FakeEngine(seeded), command(seed=chosen.seed))
    assert (again.token_ids, again.seed) == (chosen.token_ids, chosen.seed)


def test_a_chosen_seed_is_fresh_and_fits_a_double():
    seeds = {generate(FakeEngine(), command())[0].seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_an_empty_text_begins_with_the_start_of_text_token():
    engine = FakeEngine()
    (chunk,) = generate(engine, command(""))
    assert (engine.requests[0].prompt, chunk.num_prompt_tokens) == ([END], 1)
    engine = FakeEngine(info=info(bos_token_id=7))
    generate(engine, command(""))
    assert engine.requests[0].prompt == [7]


def test_an_empty_text_begins_with_no_token_that_the_model_does_not_have():
    engine = FakeEngine(info=info(vocab_size=128, bos_token_id=128, eos_token_ids=(300, 5)))
    generate(engine, command(""))
    assert engine.requests[0].prompt == [5]


def test_an_empty_text_is_refused_where_there_is_no_start_of_text_token():
    with pytest.raises(InvalidRequest, match="start-of-text") as caught:
        generate(FakeEngine(info=info(eos_token_ids=())), command(""))
    assert caught.value.field == "prompt"


def test_a_long_prompt_is_tokenized_like_a_short_one():
    engine = FakeEngine(info=info(max_model_len=10000, num_blocks=1000))
    (chunk,) = generate(engine, command("é" * 4097, max_tokens=1))
    assert chunk.num_prompt_tokens == 2 * 4097
    assert engine.requests[0].prompt == byte_tokenizer().encode("é") * 4097


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (lambda: command((97, 257)), "prompt"),
        (lambda: command((-1,)), "prompt"),
        (lambda: command("a", ()), "prompt"),
        (lambda: command(stop_token_ids=(257,)), "stop_token_ids"),
        (lambda: command(*("a",) * 65, n=2), "n"),
        (lambda: command("a" * CONTEXT), "prompt"),
        (lambda: command("a", max_tokens=CONTEXT), "max_tokens"),
        (lambda: command("a", max_tokens=0), "max_tokens"),
        (lambda: command("a", max_tokens=0, logprobs=1), "max_tokens"),
        (lambda: command("a" * (CONTEXT + 1), max_tokens=0, echo=True), "prompt"),
        (lambda: command("a" * CONTEXT, max_tokens=None), "prompt"),
        (lambda: command(decoding=DecodingParams(allowed_token_ids=(257,))), "allowed_token_ids"),
        (lambda: command(decoding=DecodingParams(logit_bias={257: 1})), "logit_bias"),
        (lambda: command(decoding=DecodingParams(logit_bias={-1: 1})), "logit_bias"),
        (lambda: command(decoding=DecodingParams(logit_bias=dict.fromkeys(range(301), 1))), "logit_bias"),
        (lambda: command(resume_token_ids=(257,)), "resume_token_ids"),
        (lambda: command(resume_token_ids=(98,) * 4), "resume_token_ids"),
        (lambda: command(resume_token_ids=(98,), n=2), "resume_token_ids"),
        (lambda: command("a", "b", resume_token_ids=(98,)), "resume_token_ids"),
    ],
)
def test_what_can_never_work_is_refused_with_its_field_before_the_engine_sees_it(asked, field):
    engine = FakeEngine()
    with pytest.raises(InvalidRequest, match=f"^{field}") as caught:
        generate(engine, asked())
    assert caught.value.field == field
    assert not engine.requests


def test_a_text_with_a_token_beyond_the_models_vocabulary_is_refused():
    """A tokenizer may know more tokens than the model has rows: one would fail the whole batch."""
    engine = FakeEngine(info=info(vocab_size=128))
    with pytest.raises(InvalidRequest) as caught:
        generate(engine, command("é"))
    assert caught.value.field == "prompt"
    assert not engine.requests


def test_a_too_long_request_says_the_words_that_clients_look_for():
    with pytest.raises(ContextTooLong, match=f"maximum context length is {CONTEXT} tokens"):
        generate(FakeEngine(), command("a" * CONTEXT))
    (chunk,) = generate(FakeEngine(), command("a" * (CONTEXT - 1), max_tokens=1))
    assert chunk.num_tokens == 1


def test_only_the_served_model_exists():
    assert generate(FakeEngine(), command(model="fake"))
    with pytest.raises(ModelNotFound, match="'other'"):
        generate(FakeEngine(), command(model="other"))


@pytest.mark.parametrize("refusal", [Overloaded("the queue is full"), Unavailable("draining")])
def test_the_engines_refusal_reaches_the_caller(refusal):
    engine = FakeEngine()
    engine.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        generate(engine, command())


RESUMED = [
    (says("naïve café 日本語 😀"), {"max_tokens": 60}),
    (says("one STO two STOP three"), {"max_tokens": 60, "stop": ("STOP", "never")}),
    (says("日本語 é😀 x"), {"max_tokens": 60, "stop": ("é😀", "語 x")}),
    (says("xx STOP yy STOP"), {"max_tokens": 60, "stop": ("STOP",), "min_tokens": 8, "include_stop_str_in_output": True}),
    (says("abcSTO"), {"max_tokens": 60, "stop": ("STOP",)}),
    (says("日"), {"max_tokens": 2}),
    (seeded, {"max_tokens": 9}),
    (successor, {"max_tokens": 9, "stop_token_ids": (ord("f"),)}),
]


@pytest.mark.parametrize(("rule", "rules"), RESUMED)
def test_a_resumed_answer_is_exactly_the_rest_of_it(rule, rules):
    def pieces(*received: int) -> list[Chunk]:
        seen: list[list[Chunk]] = []
        asked = command("a", seed=3, logprobs=1, resume_token_ids=received, **rules)
        asyncio.run(batches(build_server(FakeEngine(rule)), asked, seen))
        return [replace(chunk, prompt=None) for chunk in chain(*seen)]

    answer = pieces()
    tokens = [token for chunk in answer for token in chunk.token_ids]
    for count in range(len(tokens)):
        assert pieces(*tokens[:count]) == answer[count:]
    with pytest.raises(InvalidRequest) as caught:
        pieces(*tokens)
    assert caught.value.field == "resume_token_ids"


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt_logprobs": 0}, {"prompt_logprobs": 2, "echo": True}])
@pytest.mark.parametrize("prompt", ["abc", "a", "a" * CONTEXT])
def test_no_tokens_at_all_tell_of_the_prompt_alone(prompt, more):
    (chunk,) = generate(FakeEngine(), command(prompt, max_tokens=0, **more))
    assert (chunk.text, chunk.token_ids, chunk.num_tokens, chunk.finish_reason) == ("", (), 0, FinishReason.LENGTH)
    assert chunk.prompt.token_ids == tuple(prompt.encode())
    assert chunk.prompt.text == (prompt if "echo" in more else "")
    assert len(chunk.prompt.logprobs) == (len(prompt) - 1 if "prompt_logprobs" in more else 0)


@pytest.mark.parametrize("calls", [1, 3])
async def test_the_deadline_counts_from_the_call_on_and_preparing_is_bounded(monkeypatch, calls):
    server, never = build_server(), asyncio.Event()
    server.service._preparing = FairSemaphore(1, "requests are being prepared")
    monkeypatch.setattr(server.service.preparation, "answers", lambda command: never.wait())

    asked = [batches(server, command(deadline_ms=20), []) for _ in range(calls)]
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, DeadlineExceeded)
    assert [type(error) for error in others] == [Overloaded] * (calls - 1)
    assert not server.engine.requests


def test_scores_of_prompts_are_not_asked_for_by_the_million(monkeypatch):
    monkeypatch.setattr("attend.service.generation.prepare.MAX_PROMPT_SCORES", 24)
    asked = {"prompt_logprobs": 2, "max_tokens": 0}
    assert len(generate(FakeEngine(), command("abcd", n=2, **asked))) == 2
    with pytest.raises(InvalidRequest, match="at most 24 log probabilities of prompt tokens in all; got 3 for each of 9"):
        generate(FakeEngine(), command("abcd", "abcde", **asked))


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ((), []),
        (("x",), [b"x", b" x"]),
        (("é",), ["é".encode(), " é".encode()]),
        ((" x",), [b" x", b"  x"]),
        (("x", " x"), [b"x", b" x", b"  x"]),
        ((" ",), [b" ", b"  "]),
    ],
)
def test_a_bad_word_is_tokenized_as_it_stands_and_after_a_space(words, tokens):
    engine = FakeEngine()
    generate(engine, command(decoding=DecodingParams(bad_words=words)))
    assert engine.requests[0].bad_words == [list(each) for each in tokens]


def alarms() -> list[tuple[float, Callable[[], None], asyncio.TimerHandle]]:
    """Every alarm that this event loop is set to end answers, so that a test need not wait: (seconds, call, handle)."""
    loop, noted = asyncio.get_running_loop(), []
    real = loop.call_at

    def call_at(when, callback, *args, **more):
        handle = real(when, callback, *args, **more)
        if getattr(callback, "__name__", "") == "_expire":
            noted.append((round(when - loop.time()), lambda: callback(*args), handle))
        return handle

    loop.call_at = call_at
    return noted


def ring(engine: FakeEngine) -> None:
    """Let the deadline of the call pass now."""
    (deadline,) = [call for seconds, call, _ in engine.alarms if seconds == 50]
    deadline()


def held(asked: Command, steps: int, then, **more) -> tuple[FakeEngine, list[list[Chunk]]]:
    """Let a held engine take some steps, do `then(engine)`, and let the call end."""
    engine, seen = FakeEngine(held=True), []

    async def run() -> None:
        engine.alarms = alarms()
        task = asyncio.create_task(batches(build_server(engine, **more), asked, seen))
        await until(lambda: engine.open)
        for step in range(steps):
            engine.release()
            await until(lambda: len(seen) > step)  # noqa: B023 - the loop waits for it
        then(engine)
        await task

    asyncio.run(run())
    return engine, seen


def test_a_deadline_that_is_found_together_with_the_first_token_does_not_lose_it():
    """A slow reader finds both in one list."""

    def both(engine: FakeEngine) -> None:
        engine.release()
        ring(engine)

    _, seen = held(command(max_tokens=50, deadline_ms=50_000), 0, both)
    (chunk,) = merge_chunks(chain(*seen))
    assert (chunk.text, chunk.finish_reason) == ("b", FinishReason.DEADLINE)


@pytest.mark.parametrize("reason", [NO_TOKEN_LEFT, DEAD_END, TOO_COMPLEX])
def test_parameters_that_leave_no_token_and_grammars_that_cannot_go_on_are_the_callers_error(reason):
    engine = FakeEngine()
    engine.broken_after, engine.error = 2, reason
    with pytest.raises(InvalidRequest) as caught:
        generate(engine, command())
    assert str(caught.value) == reason


def test_a_request_that_fails_in_the_engine_fails_the_call_and_its_reason_stands_in_the_log_alone(caplog):
    engine, asked = FakeEngine(), command(n=2)
    engine.broken_after = 2
    with pytest.raises(EngineFailed) as caught:
        generate(engine, asked)
    assert "Secret" not in str(caught.value)
    assert caplog.messages == [f"request {asked.request_id} failed in the engine: {engine.error}"]
    assert not engine.open


@pytest.mark.parametrize(
    ("deadline_ms", "default", "seconds"), [(50_000, 7_000, 50), (900_000, 7_000, 600), (None, 7_000, 7), (None, None, 600)]
)
def test_the_deadline_is_the_sooner_of_the_callers_and_the_servers_and_ends_with_the_call(deadline_ms, default, seconds):
    """A default is for calls that name none."""
    asked = command(deadline_ms=deadline_ms, max_tokens=1)
    engine, _ = held(asked, 0, FakeEngine.release, deadline_default_ms=default, request_timeout=600)
    (handle,) = [handle for given, _, handle in engine.alarms if given == seconds]
    assert handle.cancelled()


async def test_closing_the_stream_aborts_every_open_request():
    engine = FakeEngine(held=True)

    server = build_server(engine)
    record = server.metrics.open("grpc", "Generate")
    stream = server.service.generate(command("a", "b", n=2, max_tokens=50), record, adapter=None)
    engine.release()
    await anext(stream)
    assert len(engine.open) == 4
    await stream.aclose()
    assert engine.aborted == [(request.request_id, FinishReason.ABORT) for request in engine.requests]
    assert not engine.open
