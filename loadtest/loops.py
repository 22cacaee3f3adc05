"""When a user sends a request: after its last answer (closed loop), at random moments (open loop), or as a trace says."""

import random
import time
from collections.abc import Sequence
from typing import Any

import gevent
from gevent.pool import Group

from loadtest.stream import RETRY_SECONDS
from loadtest.traces import Call


class ClosedLoop:
    """Asks, reads the answer to its end, asks again. A slow service is asked less often."""

    def __init__(self, user: Any) -> None:
        self.user = user

    def turn(self) -> None:
        """One request, and a pause where it was refused or failed."""
        error = self.user.request(due=None)
        if error is not None:
            gevent.sleep(getattr(error, "retry_after", RETRY_SECONDS))

    def pause(self) -> float:
        """Seconds to the next turn."""
        return 0.0

    def end(self) -> None:
        """The user stops."""


class OpenLoop:
    """Requests at random moments, `rate` a second on average, however slow the service is.

    The gaps are exponential, so that the arrivals of all users together are a Poisson process of the sum of their rates. An
    answer is timed from the moment when it was due: a generator that comes late shows as latency, and hides nothing.
    """

    def __init__(self, user: Any, rate: float, drain_seconds: float, dice: random.Random) -> None:
        self.user, self.rate, self.drain_seconds, self.dice = user, rate, drain_seconds, dice
        self.open = Group()
        self.due = time.perf_counter() + dice.expovariate(rate)

    def turn(self) -> None:
        """Begin every request that is due; waits for none."""
        while self.due <= time.perf_counter():
            self.open.spawn(self.user.request, due=self.due)
            self.due += self.dice.expovariate(self.rate)

    def pause(self) -> float:
        """Seconds to the next turn."""
        return max(0.0, self.due - time.perf_counter())

    def end(self) -> None:
        """Let the running requests end within locust's --stop-timeout; what still runs then is dropped and counted nowhere."""
        self.open.join(timeout=self.drain_seconds)
        self.open.kill()


class TraceLoop:
    """The calls of a trace, each at its time, however slow the service is; timed as those of the open loop."""

    def __init__(self, user: Any, calls: Sequence[Call], speed: float, drain_seconds: float) -> None:
        self.user, self.speed, self.drain_seconds = user, speed, drain_seconds
        self.open = Group()
        self.began = time.perf_counter()
        self.calls = list(reversed(calls))

    def turn(self) -> None:
        """Begin every call that is due."""
        while self.calls and (due := self._due()) <= time.perf_counter():
            self.open.spawn(self.user.request, due=due, call=self.calls.pop())

    def _due(self) -> float:
        return self.began + self.calls[-1].seconds / self.speed

    def pause(self) -> float:
        """Seconds to the next call; once there is none, long ones."""
        return max(0.0, self._due() - time.perf_counter()) if self.calls else 1.0

    def end(self) -> None:
        """As of the open loop."""
        self.open.join(timeout=self.drain_seconds)
        self.open.kill()
