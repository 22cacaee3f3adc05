"""RouteDeps, which the routes need of their replica; the guard: authentication, charging, records; and `bind`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request, params
from fastapi.responses import Response

from attend.model.errors import Unavailable
from attend.model.text.chat import ChatTemplate
from attend.service.access.caller import Callers
from attend.service.access.keys import KeyRing
from attend.service.batch.service import BatchService
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.contract.routes import Route
from attend.service.errors import SHUTTING_DOWN
from attend.service.generation.explain import ExplainService
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.http_api.body import Reading, most_bytes, most_bytes_of_texts
from attend.service.http_api.internal_calls import BATCH_LINE, BatchLine
from attend.service.observe.capacity import Load
from attend.service.observe.metrics import LINES, Metrics, RequestRecord
from attend.service.records import Arrival, TokenUsage
from attend.service.remarks import MaxTokensPolicy, Remarks, clamps

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


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
    unread_bodies: UnreadBodies = field(default_factory=UnreadBodies)
    """The bodies that are not read yet; gRPC's are among them."""
    grpc_port: int = 9000
    """The port of gRPC."""
    beyond_context: MaxTokensPolicy = ""
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
        return Remarks(
            self.strict_fields,
            max_model_len=self.service.engine.info.max_model_len,
            clamps=clamps(self.beyond_context, by_default=clamps_by_default),
        )

    def with_remarks(self, response: Response, remarks: Remarks, request: Request, usage: TokenUsage | None = None) -> Response:
        """The response with the headers that say what was ignored and clamped. A line of a batch is told `usage`."""
        if usage is not None and (line := line_of(request)) is not None:
            line.usage = usage
        response.headers.update(remarks.headers())
        return response


def line_of(request: Request) -> BatchLine | None:
    """The line of a batch that calls; None of a caller over HTTP."""
    return request.scope.get(BATCH_LINE)


def bind(router: APIRouter, route: Route) -> Callable[[Handler], Handler]:
    """A decorator: the function answers this route of the contract."""
    about = {"tags": [route.tag], "summary": route.summary, "response_description": "The answer."}
    return router.api_route(route.path, methods=[route.method], **about)  # type: ignore[arg-type]  # about's values differ


def guard(deps: RouteDeps, *, generates: bool) -> params.Depends:
    """Finds the caller (`request.state.caller`), asks for an API key, charges it before a body is read, and counts a
    refusal.
    """

    async def authenticate(request: Request) -> AsyncIterator[None]:
        line, state = line_of(request), request.state
        peer = None if request.client is None else request.client.host
        state.caller = deps.callers.of(request.headers.items(), peer) if line is None else line.caller
        record = open_record(deps.metrics, request)

        def on_unknown(key: str, header: str) -> None:
            state.unknown_key = header
            deps.metrics.failures.add_beside("http", key, header)

        with record.errors():
            if deps.keys is not None and line is None:
                key = deps.keys.among(request.headers.items(), on_unknown)
                record.caller = state.caller = replace(state.caller, key=key)
            state.arrival = Arrival(state.caller.turn, asyncio.get_running_loop().time())
            state.reading = Reading(state.arrival, deps.unread_bodies, deps.service.deadline_of(state.arrival, None))
            if generates and deps.is_draining():
                raise Unavailable(SHUTTING_DOWN)
            if state.caller.key is not None:
                state.caller.key.arrive(answers=int(request.method == "POST"))  # as the work with texts holds a place
            if not generates:
                yield
        if generates:
            yield
        else:
            record.count_finished()

    return params.Depends(authenticate)


def open_record(metrics: Metrics, request: Request) -> RequestRecord:
    """The record of a call, from its arrival at its route."""
    route, caller = request.scope["route"].path, request.state.caller
    transport = "http" if line_of(request) is None else LINES
    return metrics.open(transport, route, request.state.request_id, request.headers.items, caller)


def origin_of(request: Request) -> dict[str, Any]:
    """The id, the caller and the arrival of a call whose body has come."""
    return {name: getattr(request.state, name) for name in ("request_id", "caller", "arrival")}
