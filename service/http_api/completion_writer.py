"""Writers of objects with choices: what completions and chats share, and completions, whole and streamed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attend.service.contract import answers
from attend.service.http_api.logprobs import CompletionLogprobs, prompt_logprobs
from attend.service.http_api.sse import Writer
from attend.service.records import Chunk


@dataclass(slots=True)
class ChoiceWriter(Writer):
    """Writes an answer as choices."""

    prefix: ClassVar[str]
    """Of the object's id."""
    kinds: ClassVar[tuple[str, str]]
    """What a whole object is, and a streamed one."""

    def full_response(self, chunks: list[Chunk]) -> Any:
        """The object of a call that was not streamed, of one chunk for each answer."""
        made = self._object(self.kinds[0], [self.choice(chunk) for chunk in chunks], chunks)
        return made | {"usage": answers.usage(self.usage)} | self._timings(chunks)

    def chunk(self, chunk: Chunk, choice: Any = None) -> dict[str, Any]:
        """One streamed object; its text and token ids are deltas."""
        made = self._object(self.kinds[1], [self.piece(chunk) if choice is None else choice], [chunk])
        return made | self._timings([chunk]) if chunk.times is not None else made

    def ending(self) -> Sequence[Any]:
        """The usage, where the stream's options ask for it."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return ()
        return [self._object(self.kinds[1], []) | {"usage": answers.usage(self.usage)}]

    def piece(self, chunk: Chunk) -> Any:
        """A piece of an answer."""
        return self.choice(chunk)

    def choice(self, chunk: Chunk) -> Any:
        """A whole answer."""
        raise NotImplementedError

    def _object(self, kind: str, choices: list[Any], chunks: Sequence[Chunk] = ()) -> dict[str, Any]:
        made = {
            "id": f"{self.prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        if chunks:
            made["seed"] = chunks[-1].seed
        return made

    def _timings(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Milliseconds of the slowest answer that ended, and the fewest cached tokens, where the caller asks."""
        times = [chunk.times for chunk in chunks if chunk.times is not None] if self.body.timing else []
        if not times:
            return {}
        slowest = {f"{name}_ms": max(getattr(each, name) for each in times) * 1e3 for name in ("queue", "prefill", "decode")}
        return {"timing": {**slowest, "cached_tokens": min(each.cached_tokens for each in times)}}


@dataclass(slots=True)
class CompletionWriter(ChoiceWriter):
    """The objects of one /v1/completions call."""

    prefix: ClassVar[str] = "cmpl"
    kinds: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The streamed objects of a chunk: one."""
        return [self.chunk(chunk)]

    def choice(self, chunk: Chunk) -> answers.CompletionChoice:
        """An answer, or a piece of one."""
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
