"""The service between the transports and the engine: validate, tokenize, admit, stream, time, count."""

import asyncio
import difflib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from attend.model.engine.request import NO_TOKEN_LEFT, FinishReason, Output, Request, TokenEngine
from attend.model.errors import DeadlineExceeded, EngineFailed, InvalidRequest, ModelNotFound
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.net.adapters import Adapter
from attend.model.params import MAX_PROMPT_SCORES, token_ids
from attend.model.pooling import NO_EMBEDDINGS, EmbeddingRules
from attend.model.scoring import NO_SCORES, ScoreRules
from attend.model.text.mask import FAULT
from attend.model.text.schema import Whitespace
from attend.model.text.tokenizer import Tokenizer
from attend.service.access.caller import NOBODY, Caller
from attend.service.access.quota import Lease
from attend.service.generation.adapters import AdapterRegistry
from attend.service.generation.answer import Answer, check_begun
from attend.service.generation.prepare import Preparation
from attend.service.generation.thread_pools import FairSemaphore, run_in_pool
from attend.service.observe.metrics import RequestRecord
from attend.service.records import MAX_DEADLINE_MS, Arrival, Chunk, Command, Prompt

log = logging.getLogger("attend.service")

UNKNOWN = Arrival()
SHOWN = 8
"""Names that an error lists at most."""
DIGITS = 16
"""Of an adapter's SHA-256 in a fingerprint."""
MAX_VECTORS = 1 << 24
"""Numbers of embeddings in all calls at a time: some 200 MB of memory."""
MAX_SCORES = 2 * MAX_PROMPT_SCORES
"""Log probabilities of prompt tokens in all calls at a time: a GB of memory, most of it their JSON."""


class GenerationService:
    """One served model. `generate` is the only way to its engine."""

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        request_timeout: float = 600.0,
        deadline_default_ms: int | None = None,
        defaults: Defaults = NO_DEFAULTS,
        embedding: EmbeddingRules = NO_EMBEDDINGS,
        scoring: ScoreRules = NO_SCORES,
        adapter_registry: AdapterRegistry | None = None,
        json_whitespace: Whitespace = "compact",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.preparation = Preparation(engine.info, tokenizer, json_whitespace, defaults.suppress_tokens)
        self.model_name = model_name
        self.defaults = defaults
        self.embedding = embedding
        self.scoring = scoring
        self.adapter_registry = adapter_registry
        self.num_attended = 0
        """Calls that are being answered and are no lines of batches."""
        self._request_timeout = request_timeout
        self._deadline_default_ms = deadline_default_ms
        self._clock = clock
        most = engine.info.max_batch_requests + engine.info.max_queued_requests
        self._preparing = FairSemaphore(most, "requests are being prepared")
        self._scores = FairSemaphore(MAX_SCORES, "log probabilities of prompt tokens are being computed")
        self._vectors = FairSemaphore(MAX_VECTORS, "numbers of embeddings are being computed")

    async def generate(
        self, command: Command, record: RequestRecord, resources: ExitStack | None = None, *, adapter: Adapter | None
    ) -> AsyncGenerator[list[Chunk], None]:
        """The answers as they are made, in lists of chunks that arrived together. Closing the iterator aborts.

        `adapter` is the result of `adapter_of`, so that the fingerprint and the computation use the same one. Log probabilities
        of prompts, and embeddings, hold their places until the end, or until `resources` is closed: a caller that gathers
        chunks keeps them longer.

        A call in parts (`Command.in_parts`) has no more of its prompts in the engine than `_at_once` says, and takes no more
        places of its key.

        Raises an AttendError before the first list where the call is refused, and EngineFailed at any time.
        """
        with record.outcome(), self._count_waiting(command.caller), ExitStack() as stack:
            deadline = self.deadline_of(command.arrival, command.deadline_ms, patient=command.caller.is_batch)
            at_once = self._at_once(command)
            places = command.num_answers if at_once is None else at_once
            lease = stack.enter_context(admission(command.caller, places, self._least(command)))
            self.engine.check_room(places, command.caller.owner)  # a refusal must not cost the running streams a tokenization
            answers = await self._prepare(command, deadline)
            requests = [answer.request for answer in answers.values()]
            for request in requests:
                request.adapter = adapter
            if lease is not None:
                lease.reserve(sum(request.max_total_tokens for request in requests))
            if command.prompt_logprobs is not None:
                each = command.prompt_logprobs + 1
                amount = each * sum(len(request.prompt) for request in requests)
                (stack if resources is None else resources).enter_context(self._scores.hold(command.caller.owner, amount))
            if command.embedding is not None:
                amount = len(requests) * self.engine.info.hidden_size
                (stack if resources is None else resources).enter_context(self._vectors.hold(command.caller.owner, amount))
            unfinished = dict(answers)
            alarm = asyncio.get_running_loop().call_at(deadline, self._expire, requests)
            try:
                async with aclosing(self.engine.generate(requests, at_once)) as outputs:
                    async for batch in outputs:
                        chunks = self._advance(answers, unfinished, batch, record, needs_all=command.in_parts)
                        if chunks:
                            record.count_delivered(chunks, command.n)
                            if lease is not None:
                                lease.use(sum(map(_chunk_tokens, chunks)))
                            yield chunks
                        if not unfinished:
                            break
                        if command.in_parts and asyncio.get_running_loop().time() >= deadline:
                            check_begun(FinishReason.DEADLINE)  # the alarm knows the parts alone that were in the engine
            finally:
                alarm.cancel()

    @contextmanager
    def _count_waiting(self, caller: Caller) -> Iterator[None]:
        """Count a call that somebody waits for, while it lasts."""
        self.num_attended += not caller.is_batch
        try:
            yield
        finally:
            self.num_attended -= not caller.is_batch

    def deadline_of(self, arrival: Arrival, deadline_ms: int | None, *, patient: bool = False) -> float:
        """When a call must end that asks for so many milliseconds, or for none, by the event loop's clock. A `patient` one,
        which others go before, has no other limit than it asks for.
        """
        began = asyncio.get_running_loop().time() if arrival.at is None else arrival.at
        if patient:
            return began + (MAX_DEADLINE_MS if deadline_ms is None else deadline_ms) / 1000
        return began + min(self._request_timeout, (deadline_ms or self._deadline_default_ms or float("inf")) / 1000)

    @property
    def num_preparing(self) -> int:
        """Calls that are being prepared: tokenized, checked, their grammars compiled."""
        return self._preparing.num_held

    async def _prepare(self, command: Command, deadline: float) -> dict[str, Answer]:
        """The answers to make. The deadline counts here too: a long text or a grammar must not hold a place for ever."""
        with self._preparing.hold(command.caller.owner):
            try:
                async with asyncio.timeout_at(deadline):
                    return await self.preparation.answers(command)
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed before the first token") from error

    def _at_once(self, command: Command) -> int | None:
        """Of a call in parts: the prompts that may be in the engine at a time. Half a batch, so that half is left for others;
        fewer where the key may have fewer. None where all of them may.
        """
        if not command.in_parts:
            return None
        key = command.caller.key
        most = None if key is None else key.limits.concurrent
        share = max(1, self.engine.info.max_batch_requests // 2)
        return min(command.num_answers, share if most is None else max(1, min(share, most)))

    def _least(self, command: Command) -> int:
        """Tokens that a call will reserve at least, as far as that is known before its texts are tokenized."""
        most, keep = command.stops.max_tokens, command.truncate_prompt_tokens
        if most is None:  # prompt and answer fill the context
            return command.num_answers * self.engine.info.max_model_len
        if command.remarks.clamps:
            most = min(most, self.engine.info.max_model_len)
        sizes = [len(prompt) if isinstance(prompt, tuple) else 1 for prompt in command.prompts]
        return command.n * sum(most + min(size, keep or size) for size in sizes)

    @property
    def adapters(self) -> list[str]:
        """Names of adapters, each of which is a model to callers."""
        return [] if self.adapter_registry is None else self.adapter_registry.names

    def find(self, name: str) -> Adapter | None:
        """The adapter of this name; None for the served model. Raises ModelNotFound where it is neither."""
        adapter = None if self.adapter_registry is None else self.adapter_registry.get(name)
        if adapter is None and name != self.model_name:
            has = ", ".join(map(repr, [self.model_name, *self.adapters][:SHOWN]))
            near = difflib.get_close_matches(name[:128], [self.model_name, *self.adapters], 1)
            guess = f": did you mean {near[0]!r}?" if near else ""
            raise ModelNotFound(f"the model {name[:128]!r} does not exist; this server has {has}{guess}")
        return adapter

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless `name` is the served model, one of its adapters, or empty."""
        if name:
            self.find(name)

    def adapter_of(self, command: Command) -> Adapter | None:
        """The adapter that a call names, as its model or by itself; None for the served model. The call keeps it to its
        end, even if the name is removed. Raises ModelNotFound, or InvalidRequest where it names two.
        """
        of_model = self.find(command.model) if command.model else None
        adapter = self.find(command.adapter) if command.adapter else of_model
        if command.adapter and adapter is None:
            raise ModelNotFound(f"{command.adapter[:128]!r} is the served model, and no adapter of it")
        if of_model is not None and adapter is not of_model:
            names = f"{command.adapter[:128]!r} and {command.model[:128]!r}"
            raise InvalidRequest(f"adapter and model name two adapters: {names}", "adapter")
        return adapter

    def fingerprint(self, adapter: Adapter | None) -> str:
        """Identifies the weights: the engine's fingerprint, with the beginning of the adapter's SHA-256 where there is one."""
        own = self.engine.info.fingerprint
        return own if adapter is None else f"{own}-{adapter.digest[:DIGITS]}"

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, caller: Caller = NOBODY, arrival: Arrival = UNKNOWN
    ) -> list[int]:
        """Token ids of a text, made in a thread pool. Counts as an answer of the caller's key while it lasts."""
        with admission(caller):
            encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
            return await run_in_pool(encode, len(text), owner=arrival.turn)

    async def tokens_of(self, prompt: Prompt, caller: Caller = NOBODY, arrival: Arrival = UNKNOWN) -> list[int]:
        """The tokens of a prompt, also of a conversation. Counts as an answer of the caller's key while it lasts."""
        with admission(caller):
            return await self.preparation.tokens_of(prompt, arrival)

    async def detokenize(
        self, tokens: Sequence[int], name: str = "tokens", caller: Caller = NOBODY, arrival: Arrival = UNKNOWN
    ) -> str:
        """The text of token ids, special tokens included; an error calls them `name`. Made as in `tokenize`."""

        def text() -> str:
            return self.tokenizer.decode(token_ids(name, tokens, self.engine.info.vocab_size), skip_special_tokens=False)

        with admission(caller):
            return await run_in_pool(text, len(tokens), owner=arrival.turn)

    def _advance(
        self,
        answers: dict[str, Answer],
        unfinished: dict[str, Answer],
        outputs: list[Output],
        record: RequestRecord,
        *,
        needs_all: bool,
    ) -> list[Chunk]:
        """The chunks that engine outputs make of their answers, which leave `unfinished` at their end.

        `needs_all`: an answer that was not begun is an error of the call, also where others were.
        """
        chunks = []
        for output in outputs:
            answer = unfinished.get(output.request_id)
            if answer is None:
                continue  # a stop string has ended it
            if output.error is not None and output.error.startswith((NO_TOKEN_LEFT, FAULT)):
                raise InvalidRequest(output.error)
            if output.finish_reason is FinishReason.ERROR:
                log.error("request %s failed in the engine: %s", record.request_id, output.error)
                raise EngineFailed("internal error")
            if not output.token_ids and (needs_all or not any(other.has_begun for other in answers.values())):
                check_begun(output.finish_reason)  # also a call that lacks an embedding
            chunk = answer.take(output)
            if chunk.finish_reason is not None:
                chunk = self._last_chunk(chunk, output, answer.request)
                del unfinished[output.request_id]
                if chunk.times is not None:
                    record.engine_times(chunk.times)
            chunks.append(chunk)
        return chunks

    def _last_chunk(self, chunk: Chunk, output: Output, request: Request) -> Chunk:
        """The last chunk of an answer, with its times."""
        if output.finish_reason is chunk.finish_reason:
            return chunk
        self.engine.abort(output.request_id, FinishReason.STOP)  # a stop string, which the engine does not know
        return replace(chunk, times=request.times(self._clock()))

    def _expire(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request.request_id, FinishReason.DEADLINE)


def admission(caller: Caller, answers: int = 1, tokens: int = 0) -> AbstractContextManager[Lease | None]:
    """The places of a call under its key's limits, where there is a key. See `Key.admit`."""
    return nullcontext() if caller.key is None else caller.key.admit(answers, tokens)


def _chunk_tokens(chunk: Chunk) -> int:
    """Tokens that a chunk takes: each answer pays for its prompt, and for what it resumes, with its first."""
    return len(chunk.token_ids) if chunk.prompt is None else chunk.num_prompt_tokens + chunk.num_tokens
