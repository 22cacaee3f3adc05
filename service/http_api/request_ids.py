"""The one layer around the routes: a request id for each call, limits of its head, and the end of calls nobody reads."""

import asyncio
import secrets
from collections.abc import Hashable
from collections.abc import Set as AbstractSet

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attend.model.errors import AttendError
from attend.service.access.hosts import answers, host_of
from attend.service.contract.routes import PROBES
from attend.service.errors import HeadTooLarge, WrongHost
from attend.service.generation.cooperative import get_turn, yield_to_loop
from attend.service.generation.slow_reader import SlowReaderGuard
from attend.service.http_api.problems import error_response
from attend.service.records import REQUEST_ID

MAX_HEADER_BYTES = 16 << 10
"""Of the target and all header fields; gRPC's limit on metadata is the same."""
ABORT = "attend.abort"
"""Where a server's scope has a function that ends the connection with all that was not sent."""


def caller_of(scope: Scope) -> Hashable:
    """Whose call it is before anything is checked: its keys as shown, and its address. Probes do not wait for those that
    bring work.
    """
    keys = tuple(value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key"))
    return keys, (scope.get("client") or ("",))[0], scope.get("method") == "POST"


def check_head(scope: Scope, hosts: AbstractSet[str]) -> None:
    """Raises HeadTooLarge, or WrongHost where the Host is none of `hosts`, if any. Probes ask by a pod's address."""
    target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
    size = target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])  # with colon, space and line end
    if size > MAX_HEADER_BYTES:
        raise HeadTooLarge(f"the target and the headers must be at most {MAX_HEADER_BYTES} bytes together; got {size}")
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if hosts and scope["path"] not in PROBES and (wrong := [each for each in given if not answers(hosts, host_of(each))]):
        raise WrongHost(
            f"this server does not answer to the Host {wrong[0][:128]!a}, but to {', '.join(sorted(hosts))}: "
            "the setting allowed_hosts names others, and * allows any"
        )


UNKNOWN_KEY = b"x-attend-unknown-key"
"""Beside any answer: which header held a key that is not known, and was ignored, as the other key is known."""


class RequestIds:
    """Gives each request an id: the caller's own where it is plain, or a new one, sent back as X-Request-Id (by Serve:
    `behind_serve`).
    """

    def __init__(self, app: ASGIApp, hosts: AbstractSet[str] = frozenset(), *, behind_serve: bool = True) -> None:
        self.app = app
        self.hosts = hosts
        self.behind_serve = behind_serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on under its id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["path"] = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        scope["root_path"] = ""
        await yield_to_loop(caller_of(scope))  # many calls at once would hold the event loop for all of them
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        plain = len(given) == 1 and REQUEST_ID.fullmatch(given[0].decode("latin-1")) is not None
        request_id = given[0] if plain else secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        stamps = not given or not self.behind_serve

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                unknown = scope["state"].get("unknown_key", "").encode()
                told = [(b"x-request-id", request_id)] * stamps + [(UNKNOWN_KEY, unknown)] * bool(unknown)
                message["headers"] = [*message.get("headers", ()), *told]
            reader_guard.writing()
            try:
                await send(message)
            finally:
                reader_guard.write_ended()

        with SlowReaderGuard() as reader_guard:
            scope["state"]["reader_guard"] = reader_guard
            try:
                await (await self._refusal(scope) or self.app)(scope, receive, send_with_id)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not reader_guard.over or task is None or task.uncancel():
                    raise
                scope.get("extensions", {}).get(ABORT, lambda: None)()

    async def _refusal(self, scope: Scope) -> ASGIApp | None:
        """What answers a call that its head alone has refused. One without a body waits for its turn."""
        try:
            check_head(scope, self.hosts)
            if scope["method"] != "POST" and scope["path"] not in PROBES:
                await get_turn()
        except AttendError as error:
            return error_response(error, scope["state"]["request_id"], scope["path"])
        return None
