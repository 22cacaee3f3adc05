"""POST /v1/responses: OpenAI's Responses API, stateless."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response as HttpResponse

from attend.model.engine.request import FinishReason, TokenLogprob
from attend.service.contract.answers import ChatTokenLogprob, ResponseUsage
from attend.service.contract.response_answers import (
    OutputItem,
    OutputText,
    ReasoningPart,
    Response,
    ResponseEvent,
    Status,
)
from attend.service.contract.responses import ENCRYPTED, ResponsesRequest, seal
from attend.service.contract.routes import RESPONSES
from attend.service.errors import sentence, wire
from attend.service.http_api.answering import generate_answer
from attend.service.http_api.blocks import Block, BlockWriter, Change
from attend.service.http_api.logprobs import scored_token
from attend.service.http_api.route_deps import RouteDeps, bind
from attend.service.records import Chunk


def add_responses(router: APIRouter, deps: RouteDeps) -> None:
    """Add POST /v1/responses."""

    @bind(router, RESPONSES)
    async def responses(request: Request) -> HttpResponse:
        """OpenAI's Responses, stateless: each call brings its whole conversation; streamed when `stream` is true."""
        return await generate_answer(deps, request, ResponsesRequest.read, ResponseWriter)


_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "text": "response.output_text"}


@dataclass(slots=True)
class ResponseWriter(BlockWriter):
    """The objects of one call."""

    _number: int = 0

    def opening(self) -> Sequence[ResponseEvent]:
        """What a stream begins with."""
        return [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]

    def events(self, chunk: Chunk) -> Sequence[ResponseEvent]:
        """The events that a chunk makes."""
        made = [event for change in self.take(chunk) for event in self._of(change)]
        if chunk.finish_reason is not None:
            whole = self._response()
            made.append(self._event(f"response.{whole['status']}", response=whole))
        return made

    def failure(self, error: BaseException) -> ResponseEvent:
        """The last event of a stream that fails."""
        failed = self._response()
        failed["status"] = "failed"
        failed["error"] = {"code": wire(error).code, "message": sentence(error, self.request_id)}
        return self._event("response.failed", response=failed)

    def full_response(self, chunks: list[Chunk]) -> Response:
        """The object of a call that was not streamed, and whose chunks were taken."""
        return self._response()

    def _of(self, change: Change) -> Iterator[ResponseEvent]:
        """The events of one change of a block."""
        block: Block = change.block
        place: dict[str, Any] = {"output_index": block.index}
        inside: dict[str, Any] = {"item_id": self._id(block), **place, "content_index": 0}
        if change.kind == "start":
            yield self._event("response.output_item.added", **place, item=self._item(block, begins=True))
            if block.kind != "call":
                yield self._event("response.content_part.added", **inside, part=self._part(block))
        elif change.kind == "end":
            yield from self._item_done(block, inside, place)
        elif block.kind == "call":
            arguments = "response.function_call_arguments.delta"
            yield self._event(arguments, item_id=self._id(block), **place, delta=change.delta)
        else:
            more: dict[str, Any] = {"logprobs": map(self._token_logprob, change.scores)} if block.kind == "text" else {}
            yield self._event(f"{_TEXT_EVENTS[block.kind]}.delta", **inside, delta=change.delta, **more)

    def _item_done(self, block: Block, inside: dict[str, Any], place: dict[str, Any]) -> Iterator[ResponseEvent]:
        if block.kind == "call":
            name = "response.function_call_arguments.done"
            yield self._event(name, item_id=self._id(block), **place, name=block.name, arguments=block.text)
        else:
            more: dict[str, Any] = {"logprobs": self._logprobs(block)} if block.kind == "text" else {}
            yield self._event(f"{_TEXT_EVENTS[block.kind]}.done", **inside, text=block.text, **more)
            yield self._event("response.content_part.done", **inside, part=self._part(block))
        yield self._event("response.output_item.done", **place, item=self._item(block))

    def _item(self, block: Block, *, begins: bool = False) -> OutputItem:
        status: Status = "in_progress" if begins else "completed"
        if self._is_cut and block is self.blocks[-1] and not begins:
            status = "incomplete"
        if block.kind == "call":
            return {
                "type": "function_call",
                "id": self._id(block),
                "status": status,
                "call_id": self._call_id(block),
                "name": block.name,
                "arguments": block.text,
            }
        if block.kind == "text":
            content: list[OutputText] = [] if begins else [self._text(block)]
            return {"type": "message", "id": self._id(block), "status": status, "role": "assistant", "content": content}
        hides = ENCRYPTED not in (self.body.include or ()) or begins
        return {
            "type": "reasoning",
            "id": self._id(block),
            "status": status,
            "summary": [],
            "content": [] if begins else [{"type": "reasoning_text", "text": block.text}],
            "encrypted_content": None if hides else seal(block.text),
        }

    def _part(self, block: Block) -> OutputText | ReasoningPart:
        return self._text(block) if block.kind == "text" else {"type": "reasoning_text", "text": block.text}

    def _text(self, block: Block) -> OutputText:
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs(block)}

    def _logprobs(self, block: Block) -> Iterator[ChatTokenLogprob]:
        """Log probabilities of a text's tokens, as a new iterator each time."""
        return map(self._token_logprob, block.scores)

    def _token_logprob(self, token_logprob: TokenLogprob) -> ChatTokenLogprob:
        made: ChatTokenLogprob = scored_token(self.tokenizer, token_logprob, self.body.top_logprobs or 0)
        return made

    def _id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self.request_id}_{block.index}"

    def _call_id(self, block: Block) -> str:
        assert self.last is not None
        return self.last.call_id(self.request_id, block.call)

    @property
    def _is_cut(self) -> bool:
        return self.last is not None and self.last.finish_reason not in (None, FinishReason.STOP)

    def _response(self) -> Response:
        """The Response object of what has come so far."""
        body, last, command = self.body, self.last, self.command
        assert command is not None
        asked = body.model_dump(include=_SHOWN, exclude_none=True, by_alias=True)
        has_ended = last is not None and last.finish_reason is not None
        status: Status = "in_progress" if not has_ended else "incomplete" if self._is_cut else "completed"
        made: Response = {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [self._item(block) for block in self.blocks] if has_ended else [],
            "usage": self._usage() if has_ended else None,
            "system_fingerprint": self.fingerprint,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": command.sampling.temperature,
            "top_p": command.sampling.top_p,
            "presence_penalty": command.decoding.presence_penalty,
            "frequency_penalty": command.decoding.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "tool_choice": body.tool_choice or "auto",
            "tools": [_tool_object(tool) for tool in body.tools or () if tool["type"] == "function"],
            "text": {"format": {"type": "text"}} | asked.get("text", {}),
            "reasoning": {"effort": None, "summary": None} | asked.get("reasoning", {}),
            "service_tier": "default",
            "user": body.user,
            "safety_identifier": None,
            "prompt_cache_key": None,
        }
        if last is not None:
            made["seed"] = last.seed
        if last is not None and self._is_cut:
            made["incomplete_details"] = {"reason": "max_output_tokens", "finish_reason": str(last.finish_reason)}
        return made

    def _usage(self) -> ResponseUsage:
        total = self.usage.total
        return {
            "input_tokens": total.prompt,
            "input_tokens_details": {"cached_tokens": total.cached_prompt, "cache_write_tokens": 0},
            "output_tokens": total.completion,
            "output_tokens_details": {"reasoning_tokens": total.reasoning},
            "total_tokens": total.prompt + total.completion,
        }

    def _event(self, kind: Any, **fields: Any) -> ResponseEvent:
        event: ResponseEvent = {"type": kind, "sequence_number": self._number, **fields}  # type: ignore[typeddict-item]
        self._number += 1
        return event


_SHOWN = {"text", "reasoning"}


def _tool_object(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as clients read it back: with every field."""
    return {"type": "function", "name": tool["name"], "description": tool.get("description")} | {
        "parameters": tool.get("parameters"),
        "strict": bool(tool.get("strict")),
    }
