"""Ends a call whose caller has left. Ray Serve does so itself; uvicorn tells only who asks."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EndsWithCaller:
    """Cancels a call when its caller disconnects after the body, before the end of the answer.

    Without it a call that is not streamed, or waits for its first token, would be answered for nobody: until then nothing is
    written that could fail.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        task, watcher = asyncio.current_task(), None
        is_answered = is_over = False
        assert task is not None

        async def watch() -> None:
            nonlocal is_over
            while (await receive())["type"] != "http.disconnect":
                pass
            if not is_answered:
                is_over = True
                task.cancel()

        async def received() -> Message:
            nonlocal watcher
            message = await receive()
            if watcher is None and message["type"] == "http.request" and not message.get("more_body", False):
                watcher = asyncio.create_task(watch())
            return message

        async def sent(message: Message) -> None:
            nonlocal is_answered
            is_answered = is_answered or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        try:
            await self.app(scope, received, sent)
        except asyncio.CancelledError:
            if not is_over or task.uncancel():
                raise
        finally:
            if watcher is not None:
                watcher.cancel()
