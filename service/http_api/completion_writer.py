"""Writer of completion objects, whole and streamed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from attend.model.text.tokenizer import Tokenizer
from attend.service.contract import answers
from attend.service.contract.requests import CompletionRequest, Generation, StreamOptions
from attend.service.http_api.logprobs import CompletionLogprobs, prompt_logprobs
from attend.service.http_api.sse import Writer
from attend.service.records import Chunk, TokenCounts

E = TypeVar("E", bound=answers.Event)


def with_timings(event: E, body: Generation, chunks: Sequence[Chunk]) -> E:
    """The object with milliseconds of the slowest answer that ended, and the fewest cached tokens, where the caller asks."""
    times = [chunk.times for chunk in chunks if chunk.times is not None] if body.timing else []
    if times:
        event["timing"] = {
            "queue_ms": max(each.queue for each in times) * 1e3,
            "prefill_ms": max(each.prefill for each in times) * 1e3,
            "decode_ms": max(each.decode for each in times) * 1e3,
            "cached_tokens": min(each.cached_tokens for each in times),
        }
    return event


@dataclass(slots=True)
class CompletionWriter(Writer):
    """The objects of one /v1/completions call. `usage` follows the chunks that were written."""

    body: CompletionRequest
    request_id: str
    model: str
    fingerprint: str
    usage: TokenCounts
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        return self.body.stream_options

    def events(self, chunk: Chunk) -> list[answers.CompletionChunk]:
        """The streamed objects of a chunk: one."""
        return [self.chunk(chunk)]

    def chunk(self, chunk: Chunk) -> answers.CompletionChunk:
        """One streamed object; its text and token ids are deltas."""
        event = self._event([self._choice(chunk)])
        event["seed"] = chunk.seed
        return with_timings(event, self.body, [chunk])

    def last_chunk(self) -> answers.CompletionChunk:
        """The object that a stream with include_usage ends with."""
        event = self._event([])
        event["usage"] = answers.usage(self.usage)
        return event

    def full_response(self, chunks: list[Chunk]) -> answers.Completion:
        """The object of a call that was not streamed, of one chunk for each answer."""
        made: answers.Completion = {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(map(self._choice, chunks)),
            "seed": chunks[-1].seed,
            "usage": answers.usage(self.usage),
        }
        return with_timings(made, self.body, chunks)

    def _event(self, choices: list[answers.CompletionChoice]) -> answers.CompletionChunk:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _choice(self, chunk: Chunk) -> answers.CompletionChoice:
        body, prompt = self.body, chunk.prompt
        reason, stop = answers.finish_reason_of(chunk)
        choice: answers.CompletionChoice = {
            "index": chunk.index,
            "text": chunk.text if prompt is None else prompt.text + chunk.text,
            "logprobs": None if body.logprobs is None else self._logprobs_of(chunk),
            "finish_reason": reason,
            "stop_reason": stop,
        }
        if body.return_token_ids:
            choice["token_ids"] = iter(chunk.token_ids)
            if prompt is not None:
                choice["prompt_token_ids"] = iter(prompt.token_ids)
        if body.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt, body.prompt_logprobs, self.tokenizer)
        return choice

    def _logprobs_of(self, chunk: Chunk) -> answers.CompletionLogprobs:
        if chunk.index not in self._logprobs:
            skip = self.body.skip_special_tokens is not False
            echo = bool(self.body.echo)
            lists = CompletionLogprobs(self.tokenizer, self.body.logprobs or 0, skip_special_tokens=skip, echo=echo)
            lists.skip(self.body.resume_token_ids or ())
            self._logprobs[chunk.index] = lists
        return self._logprobs[chunk.index].of(chunk)
