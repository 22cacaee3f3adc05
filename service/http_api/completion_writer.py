"""OpenAI's completions: the chunks of answers to completion objects."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from attend.model.text.tokenizer import Tokenizer
from attend.service.contract.requests import CompletionRequest, Generation, StreamOptions
from attend.service.http_api.logprobs import CompletionLogprobs, prompt_logprobs
from attend.service.records import Chunk, Usage


def timing_of(body: Generation, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Milliseconds of the slowest answer that ended, and the fewest cached tokens, where the caller wants to know."""
    times = [chunk.times for chunk in chunks if chunk.times is not None]
    if not body.timing or not times:
        return {}
    slowest = {f"{name}_ms": max(getattr(each, name) for each in times) * 1e3 for name in ("queue", "prefill", "decode")}
    return {"timing": slowest | {"cached_tokens": min(each.cached_tokens for each in times)}}


@dataclass(slots=True)
class CompletionWriter:
    """The objects of one /v1/completions call. `usage` follows the chunks that were written."""

    body: CompletionRequest
    request_id: str
    model: str
    fingerprint: str
    usage: Usage
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        return self.body.stream_options

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The streamed objects of a chunk: one."""
        return [self.chunk(chunk)]

    def chunk(self, chunk: Chunk) -> dict[str, Any]:
        """One streamed object; its text and token ids are deltas."""
        return self._object([self._choice(chunk)], chunk.seed) | timing_of(self.body, [chunk])

    def last_chunk(self) -> dict[str, Any]:
        """The object that a stream with include_usage ends with."""
        return self._object([], None) | {"usage": self.usage.counts()}

    def whole(self, answers: list[Chunk]) -> dict[str, Any]:
        """The object of a call that was not streamed, of one chunk for each answer."""
        choices = [self._choice(answer) for answer in answers]
        return self._object(choices, answers[-1].seed) | {"usage": self.usage.counts()} | timing_of(self.body, answers)

    def _object(self, choices: list[dict[str, Any]], seed: int | None) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **({} if seed is None else {"seed": seed}),
        }

    def _choice(self, chunk: Chunk) -> dict[str, Any]:
        body, prompt = self.body, chunk.prompt
        choice: dict[str, Any] = {
            "index": chunk.index,
            "text": chunk.text if prompt is None else prompt.text + chunk.text,
            "logprobs": None if body.logprobs is None else self._logprobs_of(chunk),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop,
        }
        if body.return_token_ids:
            choice["token_ids"] = iter(chunk.token_ids)
            if prompt is not None:
                choice["prompt_token_ids"] = iter(prompt.token_ids)
        if body.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt, body.prompt_logprobs, self.tokenizer)
        return choice

    def _logprobs_of(self, chunk: Chunk) -> dict[str, Iterator[Any]]:
        if chunk.index not in self._logprobs:
            skip = self.body.skip_special_tokens is not False
            echo = bool(self.body.echo)
            lists = CompletionLogprobs(self.tokenizer, self.body.logprobs or 0, skip_special_tokens=skip, echo=echo)
            lists.skip(self.body.resume_token_ids or ())
            self._logprobs[chunk.index] = lists
        return self._logprobs[chunk.index].of(chunk)
