"""From a body to the HTTP response, for all routes that compute."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from attend.model.errors import NoChatTemplate
from attend.model.net.adapters import Adapter
from attend.model.text.chat import ChatTemplate
from attend.service.contract.commands import to_command
from attend.service.contract.requests import SamplingFields
from attend.service.generation.generation import GenerationService
from attend.service.http_api.body import read_json
from attend.service.http_api.json_pieces import json_response
from attend.service.http_api.route_deps import RouteDeps, open_record, origin_of
from attend.service.http_api.sse import Writer, begin
from attend.service.observe.metrics import RequestRecord
from attend.service.records import Command, ExplainCommand, TokenCounts, TokenUsage
from attend.service.remarks import Remarks

S = TypeVar("S", bound=SamplingFields)
B = TypeVar("B")
C = TypeVar("C", Command, ExplainCommand)


def template_of(deps: RouteDeps) -> ChatTemplate:
    """The chat template, or NoChatTemplate."""
    if deps.template is None:
        raise NoChatTemplate(f"{deps.service.model_name} has no chat template: use /v1/completions, or --chat-template")
    return deps.template


async def compute(
    deps: RouteDeps,
    request: Request,
    read: Callable[[dict[str, Any], Remarks], tuple[B, C]],
    work: Callable[[B, C, RequestRecord, ExitStack], Awaitable[tuple[Any, int]]],
    most: int,
) -> Response:
    """The answer to a call that generates no text. `work` gives the answer's object, and the tokens that it took."""
    record, remarks = open_record(deps.metrics, request), deps.remarks()
    with record.errors(), ExitStack() as held:
        body, command = await read_json(request, lambda fields: read(fields, remarks), most)
        request.state.request_id = record.request_id = command.request_id
        document, num_tokens = await work(body, command, record, held)
        return deps.with_remarks(json_response(document, held), remarks, request, TokenUsage(num_tokens))


async def generate_answer(
    deps: RouteDeps, request: Request, read: Callable[[dict[str, Any], Remarks], S], kind: type[Writer], *, is_chat: bool = True
) -> Response:
    """The answer to a call that generates, whole or streamed. `read` makes its body, and `kind` writes its objects."""
    service, record, remarks = deps.service, open_record(deps.metrics, request), deps.remarks(clamps_by_default=is_chat)

    def read_request(fields: dict[str, Any]) -> tuple[S, Command]:
        body = read(fields, remarks)
        template, defaults = template_of(deps) if is_chat else None, service.defaults
        return body, to_command(
            body, defaults=defaults, template=template, form=deps.form, remarks=remarks, **origin_of(request)
        )

    with record.errors():
        body, command = await read_json(request, read_request, deps.most_bytes)
        request.state.request_id = record.request_id = command.request_id
        adapter, usage = service.adapter_of(command), TokenCounts(command.n)
        model, fingerprint = command.model or service.model_name, service.fingerprint(adapter)
        writer = kind(body, command.request_id, model, fingerprint, usage, service.tokenizer, command)
        response = await _answer(service, command, adapter, writer, record)
        return deps.with_remarks(response, remarks, request, usage.total)


async def _answer(
    service: GenerationService, command: Command, adapter: Adapter | None, writer: Writer, record: RequestRecord
) -> Response:
    """The whole answer, or its stream: see `sse.begin`."""
    record.at_once = not writer.body.stream
    with ExitStack() as held:
        if writer.body.stream:
            response = await begin(service.generate(command, record, adapter=adapter), writer)
            record.has_status = True
            return response
        gathered = writer.gather()
        async for batch in service.generate(command, record, held, adapter=adapter):
            gathered.add(batch)
            writer.usage.add(batch)
        return json_response(writer.full_response(gathered.answers()), held)
