"""OpenAI's shapes: a completion request to a Command, chunks to completion objects."""

import time
from dataclasses import dataclass, field
from typing import Any

from model.errors import InvalidRequest
from model.params import SamplingParams, StopRules
from service.http_api.schemas import CompletionRequest
from service.records import Chunk, Command, Prompt, Usage, whole


def to_command(body: CompletionRequest, request_id: str) -> Command:
    """What the body asks for. Raises InvalidRequest with the field named."""
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(f"best_of must equal n, which is {n}; got {body.best_of}", "best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Command(
        prompts=prompts(body.prompt),
        sampling=SamplingParams(**given(body, "temperature", "top_p", "top_k", "min_p", "seed")),
        stops=StopRules(
            **given(body, "max_tokens", "min_tokens", "ignore_eos"),
            stop=tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop=bool(body.include_stop_str_in_output),
        ),
        n=n,
        model=body.model or "",
        request_id=request_id,
        deadline_ms=body.deadline_ms,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def given(body: CompletionRequest, *names: str) -> dict[str, Any]:
    """The fields that are not null, so that defaults stand in one place."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def prompts(value: str | list[str] | list[int] | list[list[int]] | None) -> tuple[Prompt, ...]:
    """One prompt or many, as text or as token ids."""
    if value is None:
        raise InvalidRequest(
            "prompt is required: a string, a list of strings, token ids, or a list of token-id lists", "prompt"
        )
    if isinstance(value, str):
        return (value,)
    if value and isinstance(value[0], int):
        return (tuple(value),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)  # type: ignore[arg-type]


@dataclass(slots=True)
class CompletionWriter:
    """The objects of one /v1/completions call. `usage` follows the chunks that were written."""

    body: CompletionRequest
    request_id: str
    model: str
    fingerprint: str
    usage: Usage
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, chunk: Chunk) -> dict[str, Any]:
        """One streamed object; its text and token ids are deltas."""
        return self._object([self._choice(chunk)], chunk.seed)

    def last_chunk(self) -> dict[str, Any]:
        """The object that a stream with include_usage ends with."""
        return self._object([], None) | {"usage": self.usage_object()}

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        """The object of a call that was not streamed."""
        choices = [self._choice(answer) for answer in whole(chunks)]
        return self._object(choices, chunks[-1].seed) | {"usage": self.usage_object()}

    def usage_object(self) -> dict[str, Any]:
        """Token counts so far."""
        prompt, completion = self.usage.prompt_tokens, self.usage.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

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
        return {
            "index": chunk.index,
            "text": chunk.text,
            "logprobs": None,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop,
            **({"token_ids": list(chunk.token_ids)} if self.body.return_token_ids else {}),
        }
