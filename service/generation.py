"""The service between the transports and the engine: validate, tokenize, admit, stream, time, count."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from model.engine.request import FinishReason, Output, Request, TokenEngine
from model.errors import ContextTooLong, DeadlineExceeded, EngineFailed, InvalidRequest, ModelNotFound, Unavailable
from model.params import describe, token_ids
from model.tokenizer import Tokenizer
from service.answer import Answer
from service.metrics import RequestRecord
from service.records import Chunk, Command, Prompt
from service.text import TextStream

log = logging.getLogger("attend.service")

INLINE_CHARACTERS = 4096
"""Longer prompts are tokenized in a thread, so that the event loop goes on serving streams."""
SLACK = 4
"""A prompt with so many times more characters than its context could hold is refused before it costs anything."""
SEED_BITS = 48
"""Server-chosen seeds survive a JSON reader that keeps numbers as doubles."""


class GenerationService:
    """One served model. `generate` is the only way to its engine."""

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        request_timeout: float = 600.0,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.started_at = int(time.time())
        self._request_timeout = request_timeout

    async def generate(self, command: Command, record: RequestRecord) -> AsyncGenerator[list[Chunk], None]:
        """The answers as they are made, in lists of what came together. Closing the iterator aborts.

        Raises an AttendError before the first list where the call is refused, and EngineFailed at any time.
        """
        with record.outcome():
            answers = await self._answers(command)
            seconds = min(self._request_timeout, (command.deadline_ms or float("inf")) / 1000)
            requests = [answer.request for answer in answers.values()]
            alarm = asyncio.get_running_loop().call_later(seconds, self._expire, requests)
            try:
                async with aclosing(self.engine.generate(requests)) as outputs:
                    async for batch in outputs:
                        chunks = [chunk for output in batch for chunk in self._advance(answers, output, record)]
                        if chunks:
                            record.delivered(chunks, command.n)
                            yield chunks
                        if all(answer.finish_reason for answer in answers.values()):
                            break
            finally:
                alarm.cancel()

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless `name` is the served model, or empty."""
        if name and name != self.model_name:
            raise ModelNotFound(f"the model {describe(name)} does not exist; this server has {self.model_name!r}")

    async def _answers(self, command: Command) -> dict[str, Answer]:
        """The answers to make, by the ids of their engine requests."""
        self.check_model(command.model)
        given = command.sampling.seed
        seed = secrets.randbits(SEED_BITS) if given is None else given
        prompts = [await self._tokens(prompt) for prompt in command.prompts]
        unique = secrets.token_hex(8)  # callers choose their own ids, and may choose one twice
        answers = {}
        for index in range(command.n * len(prompts)):
            request = self._request(f"{unique}-{index}", prompts[index // command.n], command, seed, index % command.n)
            text = TextStream(self.tokenizer, command.stops, skip_special_tokens=command.skip_special_tokens)
            answers[request.request_id] = Answer(index, request, command.stops, text, self.engine.info.eos_token_ids)
        return answers

    def _request(self, request_id: str, prompt: list[int], command: Command, seed: int, choice: int) -> Request:
        stops = command.stops
        token_ids("stop_token_ids", stops.stop_token_ids, self.engine.info.vocab_size)
        end = () if stops.ignore_eos else self.engine.info.eos_token_ids
        return Request(
            request_id=request_id,
            prompt=prompt,
            max_tokens=stops.max_tokens,
            sampling=command.sampling,
            seed=seed,
            choice=choice,
            stop_token_ids=frozenset((*stops.stop_token_ids, *end)),
            min_tokens=stops.min_tokens,
        )

    async def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, tuple):
            if not prompt:
                raise InvalidRequest("prompt must hold at least one token id; got an empty list", "prompt")
            return list(token_ids("prompt", prompt, self.engine.info.vocab_size))
        limit = self.engine.info.max_model_len
        if len(prompt) > SLACK * limit * self.tokenizer.longest:
            raise ContextTooLong(
                f"prompt: this model's maximum context length is {limit} tokens, which {len(prompt)} characters cannot fit",
                "prompt",
            )
        in_thread = len(prompt) > INLINE_CHARACTERS
        tokens = await asyncio.to_thread(self.tokenizer.encode, prompt) if in_thread else self.tokenizer.encode(prompt)
        if tokens and max(tokens) >= self.engine.info.vocab_size:  # a tokenizer may know more than the model does
            raise InvalidRequest(f"prompt has the token {max(tokens)}, which this model does not know", "prompt")
        return tokens or self._start_of_text()

    def _start_of_text(self) -> list[int]:
        for token in (self.tokenizer.bos_token_id, self.engine.info.bos_token_id, *self.engine.info.eos_token_ids):
            if token is not None:
                return [token]
        raise InvalidRequest("prompt is empty, and this model has no start-of-text token to begin from", "prompt")

    def _advance(self, answers: dict[str, Answer], output: Output, record: RequestRecord) -> Iterator[Chunk]:
        """The chunk that an engine output makes of its answer; none where the answer has ended already."""
        answer = answers[output.request_id]
        if answer.finish_reason is not None:
            return
        if output.finish_reason is FinishReason.ERROR:
            log.error("a request failed in the engine: %s", output.error)
            raise EngineFailed("internal error")
        if not output.token_ids and not any(other.num_tokens for other in answers.values()):
            self._raise_unstarted(output.finish_reason)
        chunk = answer.take(output)
        if chunk.finish_reason is not output.finish_reason:  # a stop string, of which the engine knows nothing
            self.engine.abort(output.request_id, FinishReason.STOP)
        if output.times is not None:
            record.engine_times(output.times)
        yield chunk

    def _raise_unstarted(self, reason: FinishReason | None) -> None:
        """A call that ends before its first token is an error, not an empty answer."""
        if reason is FinishReason.DEADLINE:
            raise DeadlineExceeded("the deadline passed before the first token")
        if reason is FinishReason.ABORT:
            raise Unavailable("the server shut down before the first token; try another replica")

    def _expire(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request.request_id, FinishReason.DEADLINE)
