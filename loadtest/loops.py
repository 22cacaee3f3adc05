"""When a user sends a request: after its last answer (closed loop), or at random moments (open loop)."""

import random
import time
from typing import Any

import gevent
from gevent.pool import Group

from loadtest.stream import RETRY_SECONDS


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
