"""Middleware without Ray: cancels a call whose caller has disconnected."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAVING = "attend.leaving"
"""Where a server's scope has a set of functions that it calls when the connection is lost."""
IS_LAST = "attend.is_last"
"""Where it has a function that is true once the next answer should be the last one of its connection."""
CLOSE = b"connection", b"close"


class CancelOnDisconnect:
    """Cancels a call whose caller disconnects before the end of the answer. Tells a caller that must go elsewhere.

    Without it a call that waits, or is not streamed, would be answered for nobody: until then nothing is written that could
    fail.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the call, or end it when its caller leaves."""
        task, extensions = asyncio.current_task(), scope["extensions"]
        leaving = extensions[LEAVING]
        is_answered = is_over = False
        assert task is not None

        def leave() -> None:
            nonlocal is_over
            if not is_answered:
                is_over = True
                task.cancel()

        async def send_and_note(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start" and extensions[IS_LAST]():
                message["headers"] = [*message.get("headers", ()), CLOSE]
            is_answered = is_answered or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        leaving.add(leave)
        try:
            await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not is_over or task.uncancel():
                raise
        finally:
            leaving.discard(leave)
