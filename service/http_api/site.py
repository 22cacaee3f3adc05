"""The replica as the routes see it, and what each of them does first: the key, the record of the call, its id."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fastapi import Request, params
from fastapi.responses import Response

from attend.model.errors import Unavailable
from attend.model.text.chat import ChatTemplate
from attend.service.access.keys import KeyRing
from attend.service.access.quota import Key, turn_of
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.errors import SHUTTING_DOWN
from attend.service.generation.explain import Explaining
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread import Unread
from attend.service.http_api.body import Reading, most_bytes, most_bytes_of_texts
from attend.service.observe.capacity import Load
from attend.service.observe.metrics import Metrics, RequestRecord
from attend.service.records import Arrival, Command, ExplainCommand
from attend.service.remarks import Beyond, Remarks, clamps

C = TypeVar("C", Command, ExplainCommand)


@dataclass(frozen=True, slots=True)
class Site:
    """What the routes need of the replica that serves them."""

    service: GenerationService
    metrics: Metrics
    version: str
    scrape: Callable[[], Awaitable[str]]
    """The metrics page over all replicas."""
    is_draining: Callable[[], bool]
    template: ChatTemplate | None = None
    """How messages become a prompt, where the checkpoint says so."""
    form: AnswerFormat = TEXT_ALONE
    """How the model writes reasoning and tool calls."""
    keys: KeyRing | None = None
    """Who may call; None lets everybody."""
    loads: Callable[[], Awaitable[tuple[int, list[Load]]]] | None = None
    """How many replicas there are, and the loads of those that answer; None where there is this one alone."""
    explaining: Explaining | None = None
    """What explains texts; None where nothing can."""
    strict_fields: bool = False
    """Whether unknown fields are errors."""
    keep_billing_header: bool = False
    """Whether the block of a system prompt stays that Claude Code writes for billing."""
    unread: Unread = field(default_factory=Unread)
    """The bodies that are not read yet; gRPC's are among them."""
    grpc_port: int = 9000
    """Where gRPC listens."""
    beyond_context: Beyond = ""
    """What a max_tokens beyond the context leads to."""

    @property
    def most_bytes(self) -> int:
        """Bytes of a body."""
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

    def said(self, response: Response, remarks: Remarks, request: Request) -> Response:
        """The response with the headers that say what was ignored and clamped. What was ignored is counted."""
        response.headers.update(remarks.headers())
        self.metrics.ignored.add(request.scope["route"].path, request.state.request_id, remarks.names)
        return response


def guard(site: Site, metrics: Metrics | None = None, is_draining: Callable[[], bool] = lambda: False) -> params.Depends:
    """What asks for an API key, charges it for each call that has work to do (a POST), before its body is read, and counts a
    refusal in `metrics`. While the server drains that comes first. A dependency of the routes, not a match on paths, which a
    forged Host header could move.
    """
    keys = site.keys
    deadline_of = None if metrics is None else site.service.deadline_of

    async def authenticate(request: Request) -> None:
        record = None if metrics is None else opened(metrics, request)
        with nullcontext() if record is None else record.errors():
            key = None if keys is None else key_of(keys, request)
            request.state.key = key
            arrival = Arrival(
                turn_of(key, site.metrics.origin(request.headers.items(), address_of(request))[0]),
                asyncio.get_running_loop().time(),
            )
            request.state.arrival = arrival
            request.state.reading = Reading(arrival, site.unread, deadline_of)
            if request.method == "POST" and is_draining():
                raise Unavailable(SHUTTING_DOWN)
            if key is not None and request.method == "POST":
                if record is not None:
                    record.key = key.name
                key.arrive()

    return params.Depends(authenticate)


def address_of(request: Request) -> str | None:
    """Who connected."""
    return None if request.client is None else request.client.host


def key_of(keys: KeyRing, request: Request) -> Key:
    """The caller's key. Raises Unauthenticated."""
    return keys.authenticate(*request.headers.getlist("authorization"), x_api_key=request.headers.getlist("x-api-key"))


def opened(metrics: Metrics, request: Request) -> RequestRecord:
    """The record of a call, from its arrival at its route."""
    path, identity = request.scope["route"].path, request.state.request_id
    record = metrics.open("http", path, identity, request.headers.items, address_of(request))
    key: Key | None = getattr(request.state, "key", None)  # not known yet where it is asked for
    record.key = None if key is None else key.name
    return record


def adopt(command: C, request: Request, record: RequestRecord) -> C:
    """The command with its caller's key. Its id, which may be the body's, is now also that of its log lines and errors."""
    request.state.request_id = record.request_id = command.request_id
    return replace(command, key=request.state.key, arrival=request.state.arrival)
