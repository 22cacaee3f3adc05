"""Writer of chat completion objects, whole and streamed."""

import time
from dataclasses import dataclass, field, replace
from typing import cast

from attend.model.text.tokenizer import Tokenizer
from attend.service.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from attend.service.contract import answers, chat_answers
from attend.service.contract.chat import ChatRequest
from attend.service.contract.requests import StreamOptions
from attend.service.http_api.completion_writer import with_timings
from attend.service.http_api.logprobs import scored_token
from attend.service.http_api.sse import Writer
from attend.service.records import Chunk, TokenCounts


@dataclass(slots=True)
class ChatWriter(Writer):
    """The objects of one /v1/chat/completions call. `usage` follows the chunks that were written."""

    body: ChatRequest
    request_id: str
    model: str
    fingerprint: str
    usage: TokenCounts
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    _begun_answers: set[int] = field(default_factory=set)

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        return self.body.stream_options

    def events(self, chunk: Chunk) -> list[chat_answers.ChatCompletionChunk]:
        """The streamed objects of a chunk: before an answer's first comes the one that gives the role.

        Each part has one of its own: clients look for one thing in a delta. The first has the tokens. The last of an answer has
        the end, and nothing of the text, as OpenAI's has none.
        """
        begins = chunk.index not in self._begun_answers
        self._begun_answers.add(chunk.index)
        opening = [self.role_chunk(chunk)] if begins else []
        if chunk.parts is None and chunk.finish_reason is None:
            return [*opening, self.chunk(chunk)]
        parts = chunk.parts if chunk.parts is not None else (Content(chunk.text),) if chunk.text else ()
        deltas = [self._delta(part, chunk) for part in parts]
        if chunk.finish_reason is not None:
            deltas.append({})
        if not deltas:
            is_silent = not chunk.logprobs and not self.body.return_token_ids
            return opening if is_silent else [*opening, self.chunk(chunk, {})]
        pieces = _split(chunk, len(deltas))
        return [*opening, *(self.chunk(piece, delta) for piece, delta in zip(pieces, deltas, strict=True))]

    def _delta(self, part: Part, chunk: Chunk) -> chat_answers.Delta:
        match part:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case CallStart(index, name):
                begun: chat_answers.CalledFunction = {"name": name, "arguments": ""}
                number = chunk.call_id(self.request_id, index)
                return {"tool_calls": [{"index": index, "id": number, "type": "function", "function": begun}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, chunk: Chunk, index: int, name: str, arguments: str) -> chat_answers.ToolCall:
        return {
            "id": chunk.call_id(self.request_id, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def role_chunk(self, chunk: Chunk) -> chat_answers.ChatCompletionChunk:
        """What the stream of the chunk's answer begins with."""
        choice: chat_answers.ChatChunkChoice = {
            "index": chunk.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self.body.return_token_ids and chunk.prompt is not None:
            choice["prompt_token_ids"] = iter(chunk.prompt.token_ids)
        return self._event([choice], chunk.seed)

    def chunk(self, chunk: Chunk, delta: chat_answers.Delta | None = None) -> chat_answers.ChatCompletionChunk:
        """One streamed object, of the chunk's text unless a delta is given; its token ids are a delta too."""
        reason, stop = answers.finish_reason_of(chunk)
        choice: chat_answers.ChatChunkChoice = {
            "index": chunk.index,
            "delta": {"content": chunk.text} if delta is None else delta,
            "logprobs": None if delta == {} and not chunk.logprobs else self._logprobs(chunk),
            "finish_reason": "tool_calls" if chunk.ends_in_calls else reason,
            "stop_reason": stop,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = iter(chunk.token_ids)
        return with_timings(self._event([choice], chunk.seed), self.body, [chunk])

    def last_chunk(self) -> chat_answers.ChatCompletionChunk:
        """The object that a stream with include_usage ends with."""
        event = self._event([], None)
        event["usage"] = answers.usage(self.usage)
        return event

    def full_response(self, chunks: list[Chunk]) -> chat_answers.ChatCompletion:
        """The object of a call that was not streamed."""
        made: chat_answers.ChatCompletion = {
            "id": f"chatcmpl-{self.request_id}",
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [self._answer(chunk) for chunk in chunks],
            "seed": chunks[-1].seed,
            "usage": answers.usage(self.usage),
        }
        return with_timings(made, self.body, chunks)

    def _answer(self, chunk: Chunk) -> chat_answers.ChatChoice:
        reason, stop = answers.finish_reason_of(chunk)
        finish_reason = "tool_calls" if chunk.ends_in_calls else reason
        choice: chat_answers.ChatChoice = {
            "index": chunk.index,
            "message": self._message(chunk),
            "logprobs": self._logprobs(chunk),
            "finish_reason": cast(chat_answers.ChatFinishReason, finish_reason),  # a whole answer has ended
            "stop_reason": stop,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = iter(chunk.token_ids)
            if chunk.prompt is not None:
                choice["prompt_token_ids"] = iter(chunk.prompt.token_ids)
        return choice

    def _message(self, answer: Chunk) -> chat_answers.AnswerMessage:
        """An answer that was not streamed."""
        parts = answer.parts or ()
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        arguments = {part.index: part.text for part in parts if isinstance(part, CallArguments)}
        starts = [part for part in parts if isinstance(part, CallStart)]
        calls = [self._call(answer, start.index, start.name, arguments.get(start.index, "")) for start in starts]
        content = None if calls and not answer.text else answer.text
        message: chat_answers.AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _event(self, choices: list[chat_answers.ChatChunkChoice], seed: int | None) -> chat_answers.ChatCompletionChunk:
        event: chat_answers.ChatCompletionChunk = {
            "id": f"chatcmpl-{self.request_id}",
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        if seed is not None:
            event["seed"] = seed
        return event

    def _logprobs(self, chunk: Chunk) -> chat_answers.ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        top = self.body.top_logprobs or 0
        return {"content": (scored_token(self.tokenizer, each, top) for each in chunk.logprobs), "refusal": None}


def _split(chunk: Chunk, count: int) -> list[Chunk]:
    """A chunk as so many: the first with its tokens, the last with its end."""
    if count == 1:
        return [chunk]
    first = replace(chunk, finish_reason=None, stop=None, times=None)
    bare = replace(first, token_ids=(), logprobs=(), prompt=None)
    last = replace(chunk, token_ids=(), logprobs=(), prompt=None)
    return [first, *[bare] * (count - 2), last]
