"""A page that anybody may request, such as metrics: made once at a time, at a limited rate."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 1.0
"""Between two pages: who asks meanwhile waits for the next one. Any number of callers cost the streams a few pages a second."""
RESTS = 9
"""So many times longer than it took to make a page, the next one is not begun: a tenth of a core at most."""


class CachedPage(Generic[T]):
    """Makes one page at a time. Who asks while it is made gets the same."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._page: asyncio.Task[T] | None = None
        self._free_at = 0.0

    async def __call__(self) -> T:
        """The page. A caller who leaves takes it from nobody."""
        if (page := self._page) is None or page.done():
            page = self._page = asyncio.create_task(self._make_page())
        return await asyncio.shield(page)

    async def _make_page(self) -> T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._free_at - loop.time())
        began = loop.time()
        try:
            return await self._make()
        finally:
            now = loop.time()
            self._free_at = now + min(MAX_PAUSE_SECONDS, max(PAUSE_SECONDS, RESTS * (now - began)))
