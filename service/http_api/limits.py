"""The limit on a request's head, which the servers in front of the application set far higher or not at all."""

from starlette.types import ASGIApp, Receive, Scope, Send

from attend.service.errors import TooLarge
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


def header_bytes(scope: Scope) -> int:
    """Bytes of a request's target and header fields, each field with its colon, space and line end."""
    target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
