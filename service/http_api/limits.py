"""Limits of a request head: the length of its headers, and its Host."""

from collections.abc import Set as AbstractSet

from starlette.types import ASGIApp, Receive, Scope, Send

from attend.service.access.hosts import answers, host_of
from attend.service.contract.routes import PROBES
from attend.service.errors import TooLarge, WrongHost
from attend.service.http_api.problems import error_response

MAX_HEADER_BYTES = 16 << 10
"""Of the target and all header fields; gRPC's limit on metadata is the same."""
STATUS = 431


class HeaderLimit:
    """Answers 431, in the shape of our errors, where a request's target and headers are over MAX_HEADER_BYTES together.

    Stands inside RequestIds, so that the answer has its id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http" or (size := header_bytes(scope)) <= MAX_HEADER_BYTES:
            await self.app(scope, receive, send)
            return
        error = TooLarge(f"the target and the headers must be at most {MAX_HEADER_BYTES} bytes together; got {size}")
        answer = error_response(error, scope["state"]["request_id"])
        answer.status_code = STATUS
        await answer(scope, receive, send)


class HostCheck:
    """Answers 421, in the shape of our errors, where a request's Host is none of `names`; with none of them there is no check.

    A browser always sends a Host, so a request without one passes. Probes pass too: they ask by a pod's address.
    """

    def __init__(self, app: ASGIApp, names: AbstractSet[str]) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if self.names and scope["type"] == "http" and scope["path"] not in PROBES:
            given = (value.decode("latin-1") for name, value in scope["headers"] if name == b"host")
            wrong = next((value for value in given if not answers(self.names, host_of(value))), None)
            if wrong is not None:
                names = ", ".join(sorted(self.names))
                error = WrongHost(
                    f"this server does not answer to the Host {wrong[:128]!a}, but to {names}: "
                    "the setting allowed_hosts names others, and * allows any"
                )
                await error_response(error, scope["state"]["request_id"], scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


def header_bytes(scope: Scope) -> int:
    """Bytes of a request's target and header fields, each field with its colon, space and line end."""
    target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
