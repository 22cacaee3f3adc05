"""Writer of chat completion objects, whole and streamed."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

from attend.service.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from attend.service.contract import answers
from attend.service.http_api.completion_writer import ChoiceWriter
from attend.service.http_api.logprobs import scored_token
from attend.service.records import Chunk


@dataclass(slots=True)
class ChatWriter(ChoiceWriter):
    """The objects of one /v1/chat/completions call."""

    prefix: ClassVar[str] = "chatcmpl"
    kinds: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    _begun_answers: set[int] = field(default_factory=set)

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The streamed objects of a chunk: a role first, then each part by itself, as clients look for one thing in a delta."""
        opening = []
        if chunk.index not in self._begun_answers:
            self._begun_answers.add(chunk.index)
            opening.append(self.chunk(replace(chunk, times=None), self._role(chunk)))
        if chunk.parts is None and chunk.finish_reason is None:
            return [*opening, self.chunk(chunk)]
        parts = chunk.parts if chunk.parts is not None else (Content(chunk.text),) if chunk.text else ()
        deltas = [self._delta(part, chunk) for part in parts]
        if chunk.finish_reason is not None:
            deltas.append({})
        if not deltas:
            if not chunk.logprobs and not self.body.return_token_ids:
                return opening
            deltas = [{}]
        pieces = zip(_split(chunk, len(deltas)), deltas, strict=True)
        return [*opening, *(self.chunk(piece, self.piece(piece, delta)) for piece, delta in pieces)]

    def _delta(self, part: Part, chunk: Chunk) -> answers.Delta:
        match part:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case CallStart(index, name):
                begun: answers.CalledFunction = {"name": name, "arguments": ""}
                number = chunk.call_id(self.request_id, index)
                return {"tool_calls": [{"index": index, "id": number, "type": "function", "function": begun}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _role(self, chunk: Chunk) -> answers.ChatChunkChoice:
        """What the stream of the chunk's answer begins with."""
        first = replace(chunk, finish_reason=None, stop=None, logprobs=())
        choice = self._choice(first, "delta", {"role": "assistant", "content": ""}) | {"logprobs": None}
        if self.body.return_token_ids and chunk.prompt is not None:
            choice["prompt_token_ids"] = iter(chunk.prompt.token_ids)
        return cast(answers.ChatChunkChoice, choice)

    def piece(self, chunk: Chunk, delta: answers.Delta | None = None) -> answers.ChatChunkChoice:
        """A piece of an answer: the chunk's text, unless a delta is given."""
        choice = self._choice(chunk, "delta", {"content": chunk.text} if delta is None else delta)
        if delta == {} and not chunk.logprobs:
            choice["logprobs"] = None
        if self.body.return_token_ids:
            choice["token_ids"] = iter(chunk.token_ids)
        return cast(answers.ChatChunkChoice, choice)

    def choice(self, chunk: Chunk) -> answers.ChatChoice:
        """A whole answer."""
        choice = self._choice(chunk, "message", self._message(chunk))
        if self.body.return_token_ids:
            choice["token_ids"] = iter(chunk.token_ids)
            if chunk.prompt is not None:
                choice["prompt_token_ids"] = iter(chunk.prompt.token_ids)
        return cast(answers.ChatChoice, choice)

    def _choice(self, chunk: Chunk, name: str, said: answers.Delta | answers.AnswerMessage) -> dict[str, Any]:
        reason, stop = answers.finish_reason_of(chunk)
        return {
            "index": chunk.index,
            name: said,
            "logprobs": self._logprobs(chunk),
            "finish_reason": "tool_calls" if chunk.ends_in_calls else reason,
            "stop_reason": stop,
        }

    def _message(self, answer: Chunk) -> answers.AnswerMessage:
        """An answer that was not streamed."""
        parts = answer.parts or ()
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        arguments = {part.index: part.text for part in parts if isinstance(part, CallArguments)}
        starts = [part for part in parts if isinstance(part, CallStart)]
        calls: list[answers.ToolCall] = [
            {
                "id": answer.call_id(self.request_id, start.index),
                "type": "function",
                "function": {"name": start.name, "arguments": arguments.get(start.index, "")},
            }
            for start in starts
        ]
        content = None if calls and not answer.text else answer.text
        message: answers.AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _logprobs(self, chunk: Chunk) -> answers.ChatLogprobs | None:
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
