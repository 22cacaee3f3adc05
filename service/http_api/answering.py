"""From a command to the HTTP response, for all routes that generate."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from attend.model.errors import NoChatTemplate
from attend.model.net.adapters import Adapter
from attend.model.text.chat import ChatTemplate
from attend.service.contract.commands import to_command
from attend.service.contract.requests import Steering
from attend.service.generation.generation import GenerationService
from attend.service.http_api.body import read_json
from attend.service.http_api.json_pieces import json_response
from attend.service.http_api.route_deps import RouteDeps, adopt, open_record
from attend.service.http_api.sse import Writer, begin
from attend.service.observe.metrics import RequestRecord
from attend.service.records import Command, TokenCounts
from attend.service.remarks import Remarks

B = TypeVar("B", bound=Steering)


def template_of(deps: RouteDeps) -> ChatTemplate:
    """The chat template, or NoChatTemplate."""
    if deps.template is None:
        raise NoChatTemplate(f"{deps.service.model_name} has no chat template: use /v1/completions, or --chat-template")
    return deps.template


async def converse(
    deps: RouteDeps,
    request: Request,
    read: Callable[[dict[str, Any], Remarks], B],
    write: Callable[[B, Command, str, TokenCounts], Writer],
) -> Response:
    """The answer to a conversation. `read` makes its body; `write` the writer, of it, its command and the fingerprint."""
    service, record, remarks = deps.service, open_record(deps.metrics, request), deps.remarks(clamps_by_default=True)
    with record.errors():

        def read_request(fields: dict[str, Any]) -> tuple[B, Command]:
            body = read(fields, remarks)
            identity = request.state.request_id
            return body, to_command(body, identity, service.defaults, template_of(deps), deps.form, remarks)

        body, command = await read_json(request, read_request, deps.most_bytes)
        command = adopt(command, request, record)
        adapter, usage = service.adapter_of(command), TokenCounts(command.n)
        writer = write(body, command, service.fingerprint(adapter), usage)
        response = await answer(service, command, adapter, writer, record, stream=bool(body.stream))
        return deps.with_remarks(response, remarks, request, usage.total)


async def answer(
    service: GenerationService,
    command: Command,
    adapter: Adapter | None,
    writer: Writer,
    record: RequestRecord,
    *,
    stream: bool,
) -> Response:
    """The whole answer, or its stream: see `sse.begin`."""
    record.at_once = not stream
    if stream:
        response = await begin(service.generate(command, record, adapter=adapter), writer)
        record.has_status = True
        return response
    gathered = writer.gather()
    with ExitStack() as held:
        async for batch in service.generate(command, record, held, adapter=adapter):
            gathered.add(batch)
            writer.usage.add(batch)
        return json_response(writer.full_response(gathered.answers()), held)
