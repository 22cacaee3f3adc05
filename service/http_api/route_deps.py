"""RouteDeps, which the routes need of their replica, and the guards: authentication, charging, records."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fastapi import Request, params
from fastapi.responses import Response

from attend.model.errors import Unavailable
from attend.model.text.chat import ChatTemplate
from attend.service.access.caller import Callers
from attend.service.access.keys import KeyRing
from attend.service.batch.service import BatchService
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.errors import SHUTTING_DOWN
from attend.service.generation.explain import ExplainService
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.http_api.body import Reading, most_bytes, most_bytes_of_texts
from attend.service.http_api.internal_calls import BATCH_LINE, BatchLine
from attend.service.observe.capacity import Load
from attend.service.observe.metrics import LINES, Metrics, RequestRecord
from attend.service.records import Arrival, Command, ExplainCommand, TokenUsage
from attend.service.remarks import Beyond, Remarks, clamps

C = TypeVar("C", Command, ExplainCommand)


@dataclass(frozen=True, slots=True)
class RouteDeps:
    """What the routes need of the replica that serves them."""

    service: GenerationService
    metrics: Metrics
    version: str
    scrape: Callable[[], Awaitable[str]]
    """The metrics page over all replicas."""
    is_draining: Callable[[], bool]
    is_leaving: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    """True once callers should go elsewhere. Their calls are still answered."""
    template: ChatTemplate | None = None
    """How messages become a prompt, where the checkpoint says so."""
    form: AnswerFormat = TEXT_ALONE
    """How the model writes reasoning and tool calls."""
    keys: KeyRing | None = None
    """Who may call; None lets everybody."""
    callers: Callers = Callers()  # noqa: RUF009 - it keeps nothing of a call
    """Finds who makes a call, but for the API key."""
    loads: Callable[[], Awaitable[tuple[int, list[Load]]]] | None = None
    """How many replicas there are, and the loads of those that answer; None where there is this one alone."""
    explaining: ExplainService | None = None
    """What explains texts; None where nothing can."""
    strict_fields: bool = False
    """True if unknown fields are errors."""
    keep_billing_header: bool = False
    """True if the block of a system prompt stays that Claude Code writes for billing."""
    unread_bodies: UnreadBodies = field(default_factory=UnreadBodies)
    """The bodies that are not read yet; gRPC's are among them."""
    grpc_port: int = 9000
    """The port of gRPC."""
    beyond_context: Beyond = ""
    """What a max_tokens beyond the context leads to."""
    batch_service: BatchService | None = None
    """What keeps files and batches; None where they are switched off."""

    @property
    def most_bytes(self) -> int:
        """The most bytes of a request body."""
        return most_bytes(self.service.engine.info.max_model_len)

    @property
    def most_bytes_of_texts(self) -> int:
        """Bytes of a body with many texts."""
        return most_bytes_of_texts(self.service.engine.info.max_model_len)

    def remarks(self, *, clamps_by_default: bool = False) -> Remarks:
        """For what the answer to one call says of it."""
        most = self.service.engine.info.max_model_len
        return Remarks(
            self.strict_fields,
            max_model_len=most,
            drops_billing=not self.keep_billing_header,
            clamps=clamps(self.beyond_context, by_default=clamps_by_default),
        )

    def with_remarks(self, response: Response, remarks: Remarks, request: Request, usage: TokenUsage | None = None) -> Response:
        """The response with the headers that say what was ignored and clamped. What was ignored is counted.

        `usage`: the tokens of the answer, which a line of a batch is told.
        """
        if usage is not None and (line := line_of(request)) is not None:
            line.usage = usage
        response.headers.update(remarks.headers())
        self.metrics.ignored.add(request.scope["route"].path, request.state.request_id, remarks.names)
        return response


def line_of(request: Request) -> BatchLine | None:
    """The line of a batch that calls; None of a caller over HTTP."""
    return request.scope.get(BATCH_LINE)


def guard(deps: RouteDeps) -> params.Depends:
    """What finds the caller (`request.state.caller`), asks for an API key, charges it for each call that generates, before its
    body is read, and counts a refusal. While the server drains that comes first. A dependency of the routes, not a match on
    paths, which a forged Host header could move.
    """

    async def authenticate(request: Request) -> None:
        record = _record_of(deps, request)
        with record.errors():
            _identify(deps, request, record, deps.service.deadline_of)
            if deps.is_draining():
                raise Unavailable(SHUTTING_DOWN)
            if record.caller.key is not None:
                record.caller.key.arrive()

    return params.Depends(authenticate)


def guard_others(deps: RouteDeps) -> params.Depends:
    """The same for calls that generate nothing. It records the whole call."""

    async def authenticate(request: Request) -> AsyncIterator[None]:
        record = _record_of(deps, request)
        with record.errors():
            _identify(deps, request, record)
            if record.caller.key is not None:
                record.caller.key.arrive(answers=int(request.method == "POST"))  # as the work with texts holds a place
            yield
        record.count_finished()

    return params.Depends(authenticate)


def _record_of(deps: RouteDeps, request: Request) -> RequestRecord:
    """A call's record, with its caller but for the key."""
    peer = None if request.client is None else request.client.host
    line = line_of(request)
    request.state.caller = deps.callers.of(request.headers.items(), peer) if line is None else line.caller
    return open_record(deps.metrics, request)


def _identify(
    deps: RouteDeps, request: Request, record: RequestRecord, deadline_of: Callable[[Arrival, int | None], float] | None = None
) -> None:
    """Find the caller's key, before the body is read. Raises Unauthenticated."""
    if deps.keys is not None and line_of(request) is None:

        def on_unknown(key: str, header: str) -> None:
            request.state.unknown_key = header
            deps.metrics.failures.add_beside("http", key, header)

        key = deps.keys.among(request.headers.items(), on_unknown)
        record.caller = request.state.caller = replace(record.caller, key=key)
    arrival = request.state.arrival = Arrival(record.caller.turn, asyncio.get_running_loop().time())
    request.state.reading = Reading(arrival, deps.unread_bodies, deadline_of)


def open_record(metrics: Metrics, request: Request) -> RequestRecord:
    """The record of a call, from its arrival at its route."""
    route, caller = request.scope["route"].path, request.state.caller
    transport = "http" if line_of(request) is None else LINES
    return metrics.open(transport, route, request.state.request_id, request.headers.items, caller)


def adopt(command: C, request: Request, record: RequestRecord) -> C:
    """The command with its caller. Its id, which may be the body's, is now also that of its log lines and errors."""
    request.state.request_id = record.request_id = command.request_id
    return replace(command.by(request.state.caller), arrival=request.state.arrival)
