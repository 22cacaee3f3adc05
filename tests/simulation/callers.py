"""Callers: each reads its call as a transport does, and checks all that it is given against what it must be."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from attend.model.engine.request import FinishReason
from attend.model.errors import (
    AttendError,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NotSupported,
    Overloaded,
    QueueFull,
    RateLimited,
    Unavailable,
)
from attend.model.pooling import Pooling
from attend.service.access import caller
from attend.service.access.quota import Key
from attend.service.generation.embed import compute_embeddings
from attend.service.merging import MergedAnswers
from attend.service.records import Chunk
from tests.simulation.answered import CLOSE, NEVER, Answered
from tests.simulation.events import Call
from tests.simulation.model import hidden
from tests.simulation.oracle import Expected, expected, tokens_of

if TYPE_CHECKING:
    from tests.simulation.life import Life

OUTCOME: dict[type[AttendError], str] = {
    InvalidRequest: "invalid",
    ContextTooLong: "invalid",
    NotSupported: "invalid",
    DeadlineExceeded: "deadline",
    EngineFailed: "error",
    Overloaded: "rejected",
    QueueFull: "rejected",
    RateLimited: "rejected",
    Unavailable: "rejected",
}
WORST = ("error", "abort", "deadline", "length", "stop")
REASON = {QueueFull: "queue", Overloaded: "preparation", Unavailable: "draining"}
LIMIT = {"requests_per_minute": "key_requests", "tokens_per_minute": "key_tokens", "concurrent": "key_concurrent"}
"""Why calls are refused, as the metrics name it: by the error, and by the limit that the sentence of RateLimited names."""


class Caller:
    """One call, from its arrival to its end."""

    def __init__(self, life: "Life", call: Call) -> None:
        self.life, self.call = life, call
        self.key: Key | None = None if call.key is None else life.keys[call.key]
        self.command = replace(call.command, caller=caller.Caller(self.key))
        self.adapter = SimpleNamespace(digest=call.adapter) if call.adapter else None
        self.deadline = float("inf")
        self.answers: dict[int, Answered] = {}
        self.outcome = ""
        """Empty until it has ended."""
        self.rejection: str | None = None
        self.failed = False
        """True if a request of it was in a step that failed."""
        self.places: dict[str, int] = {}
        """The answers that the engine's requests make, by their ids."""
        self.last_round = NEVER
        """The round of the step thread in which it ended."""
        self.left = False
        """True if the caller did not read to the end."""
        self.vectors = 0
        """Tokens of the texts whose vectors it has."""
        self.seeds: set[int] = set()
        self.arrived = False
        """True if its key was charged for it."""

    @property
    def is_open(self) -> bool:
        return not self.outcome

    @property
    def at_once(self) -> bool:
        return not self.call.stream

    def expected(self, index: int, seed: int) -> Expected:
        """What an answer must come to."""
        broken = self.call.broken
        at = broken[1] if broken is not None and broken[0] == index else None
        return expected(self.call.command, index, seed, self.life.setting.config.max_model_len, at, self.call.adapter)

    async def live(self) -> None:
        """Call, and read to the end, or not so far."""
        life, call = self.life, self.call
        seconds = min(life.setting.timeout, (call.command.deadline_ms or float("inf")) / 1000)
        self.deadline = life.now + seconds
        life.open_calls += 1
        try:
            self.outcome = await self._outcome()
            life.ended(self)
        except BaseException as error:
            life.world.note(error)
            raise
        finally:
            life.open_calls -= 1

    async def _outcome(self) -> str:
        """How the call ends for its caller."""
        try:
            done = await (self._grpc() if self.call.route[0] == "grpc" else self._http())
        except asyncio.CancelledError:
            self.left = True
            return "abort"
        except AttendError as error:
            self.check_error(error)
            self.rejection = REASON.get(type(error))
            if isinstance(error, RateLimited):
                [self.rejection] = {LIMIT[word] for word in str(error).split() if word in LIMIT}
            return OUTCOME[type(error)]
        if not done:
            self.left = True
            return "abort"
        self.check_done()
        return self.worst()

    def worst(self) -> str:
        """The outcome of a call that was answered to its end."""
        if self.command.embedding is not None:
            return "stop"
        return min((answer.reason.value for answer in self.answers.values()), key=WORST.index)

    async def _http(self) -> bool:
        """As the routes do. Whether it was read to its end."""
        life = self.life
        record = life.metrics.open(*self.call.route)
        with record.errors():  # the guard's, which counts a refusal
            self._arrive()
        record = life.metrics.open(*self.call.route)
        with record.errors():
            record.at_once = self.at_once
            if not self.call.stream:
                with ExitStack() as held:
                    return await self._whole(record, held)
            batches = life.service.generate(self.command, record, adapter=self.adapter)
            first = await anext(batches)
        async with aclosing(batches):
            self.take(first)
            return await self._read(batches, 1)

    async def _grpc(self) -> bool:
        """As the methods do."""
        record = self.life.metrics.open(*self.call.route)
        record.at_once = self.at_once
        with record.errors():
            await asyncio.sleep(0)
            self._arrive()
            if not self.call.stream:
                with ExitStack() as held:
                    return await self._whole(record, held)
            async with aclosing(self.life.service.generate(self.command, record, adapter=self.adapter)) as batches:
                return await self._read(batches, 0)

    def _arrive(self) -> None:
        if self.key is not None:
            self.key.arrive()
        self.arrived = True

    async def _read(self, batches, count: int) -> bool:
        """True if there is nothing left to read."""
        if self.call.reads == count:
            return False
        if count:
            await asyncio.sleep(self.call.pause)
        async for chunks in batches:
            self.take(chunks)
            count += 1
            if self.call.reads == count:
                return False
            await asyncio.sleep(self.call.pause)
        return True

    async def _whole(self, record, held: ExitStack) -> bool:
        service = self.life.service
        if self.command.embedding is not None:
            embedded = await compute_embeddings(service, self.command, self.call.dimensions, record, held, adapter=self.adapter)
            self.check_vectors(embedded)
            return True
        gathered = MergedAnswers()
        async for batch in service.generate(self.command, record, held, adapter=self.adapter):
            gathered.add(batch)
            self.take(batch)
        for chunk in gathered.answers():
            answer = self.answers[chunk.index]
            assert (chunk.text, list(chunk.token_ids)) == (answer.text, answer.tokens), "put together wrongly"
        return True

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that came together."""
        assert chunks, "a message without content"
        life = self.life
        for chunk in chunks:
            assert 0 <= chunk.index < self.command.num_answers
            assert self.command.sampling.seed in (None, chunk.seed), "another seed than was asked for"
            answer = self.answers.get(chunk.index)
            if answer is None:
                answer = self.answers[chunk.index] = Answered(self, chunk.index, chunk.seed)
                self.seeds.add(chunk.seed)
            echo = chunk.prompt.text if chunk.prompt is not None else ""
            prompt = self.command.prompts[chunk.index // self.command.n]
            told = tokens_of(self.command, chunk.index // self.command.n)
            if chunk.prompt is not None and self.command.echo:
                whole = isinstance(prompt, str) and (len(told) == len(prompt) or not prompt)
                wanted = prompt if whole else life.service.tokenizer.decode(told, skip_special_tokens=False)
                assert echo == wanted, f"the echo is {echo!r}, the prompt {wanted!r}"
            else:
                assert not echo
            answer.take(chunk)
        assert len(self.seeds) == 1, "answers of one call with several seeds"
        life.trace.append((life.now, self.call.number, [(chunk.index, chunk.text, chunk.token_ids) for chunk in chunks]))

    def check_vectors(self, embedded) -> None:
        """Each text as its vector."""
        rules, prompts = self.command.embedding, [tokens_of(self.command, at) for at in range(len(self.command.prompts))]
        for prompt, vector in zip(prompts, embedded.vectors, strict=True):
            states = np.array([hidden(token, position) for position, token in enumerate(prompt)])
            pooled = {Pooling.MEAN: states.mean(axis=0), Pooling.LAST: states[-1], Pooling.CLS: states[0]}[rules.pooling]
            pooled = pooled[: self.call.dimensions]
            assert np.allclose(vector, pooled / np.linalg.norm(pooled), atol=1e-6), "a wrong vector"
        self.vectors = sum(map(len, prompts))
        assert embedded.num_tokens == self.vectors

    def check_done(self) -> None:
        """A call that was answered: all of it, and nothing was wrong with it."""
        if self.command.embedding is None:
            assert {*self.answers} == {*range(self.command.num_answers)}, "an answer is missing"
            assert all(answer.reason is not None for answer in self.answers.values()), "an answer without an end"
            silent = not any(answer.tokens or answer.reason is FinishReason.LENGTH for answer in self.answers.values())
            assert not silent, "an empty answer in place of an error"
        ends = {answer.reason for answer in self.answers.values()}
        assert not self.can_never_work(), "answered, though it can never work"
        assert ends & {FinishReason.DEADLINE, FinishReason.ABORT} or not self.fates() & {"poison", "invalid"}, "it must fail"

    def fates(self) -> set[str]:
        """What goes wrong in its answers, run to their ends."""
        seed = next(iter(self.seeds), self.command.sampling.seed)
        if self.command.embedding is not None:
            return set()
        if seed is None:  # unknown, since nothing came
            return {"invalid", "poison"} if self.command.decoding.allowed_token_ids or self.command.grammar else set()
        return {str(self.expected(index, seed).error) for index in range(self.command.num_answers)}

    @property
    def sizes(self) -> list[int]:
        """The most tokens that an answer to each prompt may have, with the prompt."""
        most, context = self.command.stops.max_tokens, self.life.setting.config.max_model_len
        prompts = [len(tokens_of(self.command, place)) for place in range(len(self.command.prompts))]
        return [size + (max(1, context - size) if most is None else most) for size in prompts]

    @property
    def asked(self) -> int:
        """Tokens that it reserves at most."""
        return max(self.command.n * sum(self.sizes), self.command.num_answers * self.life.setting.config.max_model_len)

    def can_never_work(self) -> bool:
        """True if the call asks for more than the server, or its key, ever gives."""
        command, config = self.command, self.life.setting.config
        prompts = [tokens_of(command, place) for place in range(len(command.prompts))]
        whole = [len(prompt) for prompt in command.prompts if isinstance(prompt, tuple)]
        if command.truncate_prompt_tokens is None and any(size > config.max_model_len for size in whole):
            return True
        sizes = self.sizes
        limits = None if self.key is None else self.key.limits
        rules, at_once = command.embedding, 1 if command.in_parts else command.num_answers
        return (
            max(sizes) > config.max_model_len
            or at_once > config.max_batch_requests + self.life.setting.queued
            or (limits is not None and limits.concurrent is not None and at_once > max(1, limits.concurrent))
            or (
                limits is not None
                and limits.tokens_per_minute is not None
                and command.n * sum(sizes) > limits.tokens_per_minute
            )
            or (rules is not None and rules.max_tokens is not None and max(map(len, prompts)) > rules.max_tokens)
        )

    def check_error(self, error: AttendError) -> None:
        """An error is one that this call may come to."""
        life, said = self.life, f"call {self.call.number} failed without reason: {error!r}"
        if isinstance(error, InvalidRequest):
            assert self.can_never_work() or "invalid" in self.fates(), said
        elif isinstance(error, RateLimited):
            assert self.key is not None and life.is_at_limit(self.key, self), said
        elif isinstance(error, QueueFull):
            free = life.setting.config.max_batch_requests + life.setting.queued - life.num_answers_open
            mine = [other for other in life.callers if other.is_open and other.key is self.key and other is not self]
            held = sum(other.command.num_answers for other in mine)
            shares = self.key is not None and held > 0
            assert free < 0 or (shares and held + self.command.num_answers > 3 * (free + 1)), said
        elif isinstance(error, Overloaded):
            assert life.open_calls > 1, said
        elif isinstance(error, Unavailable):
            assert life.closing or life.died, said
        elif isinstance(error, DeadlineExceeded):
            assert life.now >= self.deadline - CLOSE, said
        else:
            assert life.died or self.failed or "poison" in self.fates(), said

    @property
    def num_delivered(self) -> int:
        """Tokens of answers that it was given."""
        return sum(len(answer.tokens) for answer in self.answers.values())

    def taken(self) -> tuple[int, int]:
        """The least and the most that its key pays in tokens."""
        if self.command.embedding is not None:
            most = sum(len(tokens_of(self.command, at)) for at in range(len(self.command.prompts)))
            return (self.vectors, self.vectors) if self.vectors else (0, most)
        begun = sum(len(answer.expected.prompt) + answer.resumed for answer in self.answers.values())
        return begun + self.num_delivered, begun + self.num_delivered

    def counted(self) -> tuple[int, int]:
        """Prompt tokens and tokens of answers that the metrics have of it."""
        if self.at_once and self.outcome not in WORST[2:] and not (self.outcome == "abort" and self.complete):
            return 0, 0
        if self.at_once and self.outcome == "deadline" and not self.complete:
            return 0, 0
        places = {answer.index // self.command.n: len(answer.expected.prompt) for answer in self.answers.values()}
        return sum(places.values()) + self.vectors, self.num_delivered

    @property
    def complete(self) -> bool:
        """True if all answers have ended."""
        ended = [answer for answer in self.answers.values() if answer.reason is not None]
        return len(ended) == self.command.num_answers and self.rejection is None
