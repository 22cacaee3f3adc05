"""OpenAI's chat: the chunks of answers to chat completion objects."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from attend.model.engine.request import TokenLogprob
from attend.model.text.tokenizer import Tokenizer
from attend.service.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from attend.service.contract.chat import ChatRequest
from attend.service.contract.requests import StreamOptions
from attend.service.http_api.completion_writer import timing_of
from attend.service.http_api.logprobs import finite
from attend.service.records import Chunk, Usage


@dataclass(slots=True)
class ChatWriter:
    """The objects of one /v1/chat/completions call. `usage` follows the chunks that were written."""

    body: ChatRequest
    request_id: str
    model: str
    fingerprint: str
    usage: Usage
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        return self.body.stream_options

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The streamed objects of a chunk: before an answer's first comes the one that gives the role.

        Each part has one of its own: clients look for one thing in a delta. The first has the tokens, the last the end.
        """
        begins = chunk.index not in self._begun
        self._begun.add(chunk.index)
        opening = [self.role_chunk(chunk)] if begins else []
        if chunk.parts is None:
            return [*opening, self.chunk(chunk)]
        deltas = [self._delta(part, chunk) for part in chunk.parts]
        if not deltas:
            is_silent = chunk.finish_reason is None and not chunk.logprobs and not self.body.return_token_ids
            return opening if is_silent else [*opening, self.chunk(chunk, {})]
        pieces = _split(chunk, len(deltas))
        return [*opening, *(self.chunk(piece, delta) for piece, delta in zip(pieces, deltas, strict=True))]

    def _delta(self, part: Part, chunk: Chunk) -> dict[str, Any]:
        match part:
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case Content(text):
                return {"content": text}
            case CallStart(index, name):
                return {"tool_calls": [{"index": index, **self._call(chunk, index, name, "")}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, chunk: Chunk, index: int, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": chunk.call_id(self.request_id, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def role_chunk(self, chunk: Chunk) -> dict[str, Any]:
        """What the stream of the chunk's answer begins with."""
        delta = {"role": "assistant", "content": ""}
        choice: dict[str, Any] = {"index": chunk.index, "delta": delta, "logprobs": None}
        choice |= {"finish_reason": None, "stop_reason": None}
        if self.body.return_token_ids and chunk.prompt is not None:
            choice["prompt_token_ids"] = iter(chunk.prompt.token_ids)
        return self._object("chat.completion.chunk", [choice], chunk.seed)

    def chunk(self, chunk: Chunk, delta: dict[str, Any] | None = None) -> dict[str, Any]:
        """One streamed object, of the chunk's text unless a delta is given; its token ids are a delta too."""
        choice = self._choice(chunk, {"delta": {"content": chunk.text} if delta is None else delta})
        return self._object("chat.completion.chunk", [choice], chunk.seed) | timing_of(self.body, [chunk])

    def last_chunk(self) -> dict[str, Any]:
        """The object that a stream with include_usage ends with."""
        return self._object("chat.completion.chunk", [], None) | {"usage": self.usage.counts()}

    def whole(self, answers: list[Chunk]) -> dict[str, Any]:
        """The object of a call that was not streamed."""
        choices = []
        for answer in answers:
            choice = self._choice(answer, {"message": self._message(answer)})
            if self.body.return_token_ids and answer.prompt is not None:
                choice["prompt_token_ids"] = iter(answer.prompt.token_ids)
            choices.append(choice)
        return (
            self._object("chat.completion", choices, answers[-1].seed)
            | {"usage": self.usage.counts()}
            | timing_of(self.body, answers)
        )

    def _message(self, answer: Chunk) -> dict[str, Any]:
        """An answer that was not streamed."""
        parts = answer.parts or ()
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        arguments = {part.index: part.text for part in parts if isinstance(part, CallArguments)}
        starts = [part for part in parts if isinstance(part, CallStart)]
        calls = [self._call(answer, start.index, start.name, arguments.get(start.index, "")) for start in starts]
        return {
            "role": "assistant",
            "content": None if calls and not answer.text else answer.text,
            "refusal": None,
            **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def _object(self, kind: str, choices: list[dict[str, Any]], seed: int | None) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **({} if seed is None else {"seed": seed}),
        }

    def _choice(self, chunk: Chunk, text: dict[str, Any]) -> dict[str, Any]:
        rows = {"content": map(self._scored, chunk.logprobs), "refusal": None}
        return {
            "index": chunk.index,
            **text,
            "logprobs": rows if self.body.logprobs else None,
            "finish_reason": "tool_calls" if chunk.ends_in_calls else chunk.finish_reason,
            "stop_reason": chunk.stop,
            **({"token_ids": iter(chunk.token_ids)} if self.body.return_token_ids else {}),
        }

    def _scored(self, scored: TokenLogprob) -> dict[str, Any]:
        top = scored.top[: self.body.top_logprobs or 0]
        return self._token(scored.token_id, scored.logprob) | {"top_logprobs": [self._token(*each) for each in top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, its_bytes = self.tokenizer.text_of(token), self.tokenizer.bytes_of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(its_bytes)}


def _split(chunk: Chunk, count: int) -> list[Chunk]:
    """A chunk as so many: the first with its tokens, the last with its end."""
    if count == 1:
        return [chunk]
    first = replace(chunk, finish_reason=None, stop=None, times=None)
    bare = replace(first, token_ids=(), logprobs=(), prompt=None)
    last = replace(chunk, token_ids=(), logprobs=(), prompt=None)
    return [first, *[bare] * (count - 2), last]
