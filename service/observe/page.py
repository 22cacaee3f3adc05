"""A page that anybody may ask for and that takes milliseconds of plain Python to make."""

import asyncio
from collections.abc import Awaitable, Callable

PAUSE_SECONDS = 0.1
"""Between two pages: who asks meanwhile waits for the next one. Any number of callers cost the streams a few pages a second."""


class Page:
    """Makes one page at a time. Who asks while it is made gets the same."""

    def __init__(self, make: Callable[[], Awaitable[str]]) -> None:
        self._make = make
        self._page: asyncio.Task[str] | None = None
        self._free_at = 0.0

    async def __call__(self) -> str:
        """The page. A caller who leaves takes it from nobody."""
        if (page := self._page) is None or page.done():
            page = self._page = asyncio.create_task(self._made())
        return await asyncio.shield(page)

    async def _made(self) -> str:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._free_at - loop.time())
        try:
            return await self._make()
        finally:
            self._free_at = loop.time() + PAUSE_SECONDS
