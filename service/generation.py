"""The service between the transports and the engine: validate, tokenize, admit, stream, time, count."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import partial

from model.engine.request import NO_TOKEN_LEFT, FinishReason, Output, Request, TokenEngine
from model.errors import DeadlineExceeded, EngineFailed, InvalidRequest, ModelNotFound, Overloaded, Unavailable
from model.params import token_ids
from model.tokenizer import Tokenizer
from service.answer import Answer
from service.aside import aside
from service.keys import Lease
from service.metrics import RequestRecord
from service.prepare import Preparation
from service.records import Chunk, Command

log = logging.getLogger("attend.service")


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.preparation = Preparation(engine.info, tokenizer)
        self.model_name = model_name
        self.started_at = int(time.time())
        self._request_timeout = request_timeout
        self._deadline_default_ms = deadline_default_ms
        self._clock = clock
        self._num_preparing = 0
        self._most_preparing = engine.info.max_batch_requests + engine.info.max_queued_requests

    async def generate(self, command: Command, record: RequestRecord) -> AsyncGenerator[list[Chunk], None]:
        """The answers as they are made, in lists of what came together. Closing the iterator aborts.

        Raises an AttendError before the first list where the call is refused, and EngineFailed at any time.
        """
        with record.outcome(), ExitStack() as stack:
            self.check_model(command.model)
            seconds = min(self._request_timeout, (command.deadline_ms or self._deadline_default_ms or float("inf")) / 1000)
            deadline = asyncio.get_running_loop().time() + seconds
            answers = await self._prepared(command, deadline)
            lease = stack.enter_context(_admitted(command, answers))
            lease.used(0)  # until something is made, nothing is taken
            unfinished = dict(answers)
            requests = [answer.request for answer in answers.values()]
            alarm = asyncio.get_running_loop().call_at(deadline, self._expire, requests)
            try:
                async with aclosing(self.engine.generate(requests)) as outputs:
                    async for batch in outputs:
                        chunks = self._advance(answers, unfinished, batch, record)
                        if chunks:
                            record.delivered(chunks, command.n)
                            if command.key is not None:
                                lease.used(lease.tokens + sum(map(_taken, chunks)))
                            yield chunks
                        if not unfinished:
                            break
            finally:
                alarm.cancel()

    async def _prepared(self, command: Command, deadline: float) -> dict[str, Answer]:
        """The answers that are to be made. A text that takes long, or a grammar, must not hold a place for ever."""
        if self._num_preparing >= self._most_preparing:
            raise Overloaded(f"{self._num_preparing} requests are being prepared already")
        self._num_preparing += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await self.preparation.answers(command)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the first token") from error
        finally:
            self._num_preparing -= 1

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless `name` is the served model, or empty."""
        if name and name != self.model_name:
            raise ModelNotFound(f"the model {name[:128]!r} does not exist; this server has {self.model_name!r}")

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, made beside the event loop where that takes long."""
        return await aside(partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens), len(text))

    async def detokenize(self, tokens: Sequence[int], name: str = "tokens") -> str:
        """The text of token ids, special tokens included; an error calls them `name`. Made beside the event loop too."""

        def text() -> str:
            return self.tokenizer.decode(token_ids(name, tokens, self.engine.info.vocab_size), skip_special_tokens=False)

        return await aside(text, len(tokens))

    def _advance(
        self, answers: dict[str, Answer], unfinished: dict[str, Answer], outputs: list[Output], record: RequestRecord
    ) -> list[Chunk]:
        """The chunks that engine outputs make of their answers, which leave `unfinished` at their end."""
        chunks = []
        for output in outputs:
            answer = unfinished.get(output.request_id)
            if answer is None:
                continue  # a stop string has ended it
            if output.error == NO_TOKEN_LEFT:
                raise InvalidRequest(NO_TOKEN_LEFT)
            if output.finish_reason is FinishReason.ERROR:
                log.error("a request failed in the engine: %s", output.error)
                raise EngineFailed("internal error")
            if not output.token_ids and not any(other.begun for other in answers.values()):
                self._raise_unstarted(output.finish_reason)
            chunk = answer.take(output)
            if chunk.finish_reason is not None:
                chunk = self._ended(chunk, output, answer.request)
                del unfinished[output.request_id]
                if chunk.times is not None:
                    record.engine_times(chunk.times)
            chunks.append(chunk)
        return chunks

    def _ended(self, chunk: Chunk, output: Output, request: Request) -> Chunk:
        """The last chunk of an answer, with its times."""
        if output.finish_reason is chunk.finish_reason:
            return chunk
        self.engine.abort(output.request_id, FinishReason.STOP)  # a stop string, of which the engine knows nothing
        return replace(chunk, times=request.times(self._clock()))

    def _raise_unstarted(self, reason: FinishReason | None) -> None:
        """A call that ends before its first token is an error, not an empty answer."""
        if reason is FinishReason.DEADLINE:
            raise DeadlineExceeded("the deadline passed before the first token")
        if reason is FinishReason.ABORT:
            raise Unavailable("the server shut down before the first token; try another replica")

    def _expire(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request.request_id, FinishReason.DEADLINE)


def _admitted(command: Command, answers: dict[str, Answer]) -> AbstractContextManager[Lease]:
    """The place of a call under its key's limits; RateLimited where there is none."""
    most = sum(answer.request.max_total_tokens for answer in answers.values())
    if command.key is None:
        return nullcontext(Lease(most))
    return command.key.admit(most)


def _taken(chunk: Chunk) -> int:
    """Tokens that a chunk takes: each answer pays for its prompt too, with its first."""
    return len(chunk.token_ids) if chunk.prompt is None else chunk.num_prompt_tokens + chunk.num_tokens
