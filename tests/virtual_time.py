"""An event loop in which waiting takes no time, so that what is tested does not depend on how busy the machine is."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for a timeout, puts the clock on by it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """When nobody is ready, its clock, which begins at 0, jumps to the next alarm. For code that waits for no thread."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds of waiting so far."""
        return self._jumping.now


def run_at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
