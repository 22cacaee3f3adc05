"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from attend.model.engine.request import FinishReason
from attend.service.chat.messages import arguments_json
from attend.service.contract.anthropic import (
    AnswerBlock,
    AnthropicError,
    CountTokensRequest,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    MessageUsage,
    StopReason,
    TokenCount,
)
from attend.service.contract.commands import conversation_of
from attend.service.contract.routes import COUNT_TOKENS, MESSAGES
from attend.service.http_api.answering import generate_answer, template_of
from attend.service.http_api.blocks import Block, BlockWriter, Change
from attend.service.http_api.body import read_json
from attend.service.http_api.json_pieces import json_response
from attend.service.http_api.problems import anthropic_body
from attend.service.http_api.route_deps import RouteDeps, bind
from attend.service.records import Chunk, Prompt

SIGNATURE = "attend"
"""Of reasoning: clients send it back. Nothing is signed."""
PING: MessageEvent = {"type": "ping"}


def add_messages(router: APIRouter, deps: RouteDeps) -> None:
    """Add the route that generates: POST /v1/messages."""

    @bind(router, MESSAGES)
    async def messages(request: Request) -> Response:
        """Anthropic's messages, streamed when `stream` is true."""
        return await generate_answer(deps, request, MessagesRequest.read, MessageWriter)


def add_count_tokens(router: APIRouter, deps: RouteDeps) -> None:
    """Add POST /v1/messages/count_tokens."""

    @bind(router, COUNT_TOKENS)
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a call has."""
        remarks = deps.remarks()

        def read(fields: dict[str, Any]) -> tuple[str, Prompt]:
            body = CountTokensRequest.read(fields, remarks)
            (prompt,) = conversation_of(body, template_of(deps), deps.form, remarks)["prompts"]
            return body.model or "", prompt

        model, prompt = await read_json(request, read, deps.most_bytes)
        deps.service.check_model(model)
        tokens = await deps.service.tokens_of(prompt, request.state.caller, request.state.arrival)
        counted: TokenCount = {"input_tokens": len(tokens)}
        return deps.with_remarks(json_response(counted), remarks, request)


@dataclass(slots=True)
class MessageWriter(BlockWriter):
    """The objects of one call."""

    keep_alive: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'
    _has_begun: bool = False

    def events(self, chunk: Chunk) -> Sequence[MessageEvent]:
        """The events of a chunk. The first ones wait for it, since they have the size of the prompt."""
        made: list[MessageEvent] = []
        if not self._has_begun:
            self._has_begun = True
            made += [{"type": "message_start", "message": self._message(begins=True)}, PING]
        for change in self.take(chunk):
            made += self._of(change)
        return made

    def ending(self) -> Sequence[MessageEvent]:
        """The end, with what the call took."""
        assert self.last is not None
        reason, sequence = self._stop_reason()
        return [
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": self._counts(),
            },
            {"type": "message_stop"},
        ]

    def failure(self, error: BaseException) -> AnthropicError:
        """The last event of a stream that fails."""
        return anthropic_body(error, self.request_id)

    def full_response(self, chunks: list[Chunk]) -> MessageAnswer:
        """The object of a call that was not streamed, and whose chunks were taken."""
        return self._message()

    def _of(self, change: Change) -> list[MessageEvent]:
        """The events of one change of a block."""
        block = change.block
        if change.kind == "start":
            return [{"type": "content_block_start", "index": block.index, "content_block": self._block(block, begins=True)}]
        if change.kind == "grow":
            return [self._delta(block, change.delta)]
        signed: list[MessageEvent] = []
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = [{"type": "content_block_delta", "index": block.index, "delta": delta}]  # type: ignore[typeddict-item]
        return [*signed, {"type": "content_block_stop", "index": block.index}]

    def _delta(self, block: Block, text: str) -> MessageEvent:
        event: MessageEvent = {"type": "content_block_delta", "index": block.index}
        match block.kind:
            case "text":
                event["delta"] = {"type": "text_delta", "text": text}
            case "reasoning":
                event["delta"] = {"type": "thinking_delta", "thinking": text}
            case "call":
                event["delta"] = {"type": "input_json_delta", "partial_json": text}
        return event

    def _block(self, block: Block, *, begins: bool = False) -> AnswerBlock:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": "" if begins else SIGNATURE}
        assert self.last is not None
        number = f"toolu_{self.last.call_id(self.request_id, block.call)}"
        return {"type": "tool_use", "id": number, "name": block.name, "input": {} if begins else _input(block)}

    def _message(self, *, begins: bool = False) -> MessageAnswer:
        reason, sequence = (None, None) if begins else self._stop_reason()
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [] if begins else [self._block(block) for block in self.blocks],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._counts(),
        }

    def _stop_reason(self) -> tuple[StopReason, str | None]:
        """Why the answer ended, and which stop sequence it was."""
        assert self.last is not None
        if self.last.ends_in_calls:
            return "tool_use", None
        if self.last.finish_reason is not FinishReason.STOP:
            return "max_tokens", None
        stop = self.last.stop
        return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)

    def _counts(self) -> MessageUsage:
        total = self.usage.total
        return {
            "input_tokens": total.prompt - total.cached_prompt,
            "cache_read_input_tokens": total.cached_prompt,
            "cache_creation_input_tokens": 0,
            "output_tokens": total.completion,
            "output_tokens_details": {"thinking_tokens": total.reasoning},
        }


def _input(block: Block) -> dict[str, Any]:
    """The arguments of a call as they were written: no number is rounded."""
    return cast(dict[str, Any], orjson.Fragment(arguments_json(block.text)))
