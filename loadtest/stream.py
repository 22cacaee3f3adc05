"""What is asked; the clock of one streamed answer, and the rows that it becomes in locust's statistics."""

import random
import time
from itertools import count
from typing import Any

TRANSPORTS = ("HTTP", "GRPC")
PROMPTS = {
    "short": {"short": 1.0},
    "long": {"long": 1.0},
    "shared": {"shared": 1.0},
    "mixed": {"short": 0.6, "long": 0.2, "shared": 0.2},
}
"""Share of each kind of prompt, by the name of the mix."""
TTFT, ITL, TPOT, TOTAL, REFUSED = "TTFT", "ITL", "TPOT", "TOTAL", "REFUSED"
RETRY_SECONDS = 1.0
"""A refused user waits so long at most, and as long as that where it is told nothing."""


def draw(dice: random.Random, mix: str, long_chars: int) -> tuple[str, str]:
    """(kind, text) of the next prompt, the same for dice of the same seed.

    `short` is a line, `long` is `long_chars` characters of code; each begins with a line of its own, so that no prompt is in
    the prefix cache. `shared` is as long as `long`, but the same for everybody up to its last line.
    """
    shares = PROMPTS[mix]
    kind = dice.choices(list(shares), weights=list(shares.values()))[0]
    own = f"# {dice.getrandbits(32):08x}\n"
    texts = {"short": f"{own}def fibonacci(n):\n", "long": own + code(long_chars), "shared": code(long_chars) + own}
    return kind, texts[kind]


def code(chars: int) -> str:
    """The same `chars` characters of Python at each call."""
    text, numbers = "", count()
    while len(text) < chars:
        number = next(numbers)
        text += f"def step_{number}(state):\n    state.total += {number}\n    return state.total\n\n\n"
    return text[:chars]


class RefusedError(Exception):
    """The service is full and says so: 429 or RESOURCE_EXHAUSTED."""

    def __init__(self, what: str, retry_after: float = RETRY_SECONDS) -> None:
        super().__init__(what)
        self.retry_after = min(retry_after, RETRY_SECONDS)


class FailedError(Exception):
    """An answer that is wrong or not complete."""


class Stream:
    """Times of one answer in seconds on the monotonic clock, from the moment when it was due to be asked for."""

    def __init__(self, due: float | None = None) -> None:
        self.started = time.perf_counter() if due is None else due
        self.first = 0.0
        """0 until a message has come."""
        self.last = 0.0
        self.gaps: list[float] = []
        self.tokens = 0

    def message_received(self) -> None:
        """A message with text has come."""
        now = time.perf_counter()
        if self.last:
            self.gaps.append(now - self.last)
        self.first = self.first or now
        self.last = now

    def finish(self, reason: str | None) -> None:
        """Raises FailedError where the answer ended, but not as an answer ends."""
        if reason in ("error", "abort"):
            raise FailedError(f"finish_reason {reason}")

    def check(self) -> None:
        """Raises FailedError where there was an end and nothing before it."""
        if not self.first:
            raise FailedError("complete, but without a token")

    def rows(self, error: Exception | None) -> list[tuple[str, float]]:
        """(row, seconds) of an answer that is now over: one REFUSED or TOTAL, and what was heard of a complete one."""
        whole = time.perf_counter() - self.started
        if error is not None:
            return [(REFUSED if isinstance(error, RefusedError) else TOTAL, whole)]
        rows = [(TOTAL, whole), (TTFT, self.first - self.started), *((ITL, gap) for gap in self.gaps)]
        if self.tokens > 1:
            rows.append((TPOT, (self.last - self.first) / (self.tokens - 1)))
        return rows


def report(environment: Any, name: str, stream: Stream, error: Exception | None) -> None:
    """Put an answer into locust's statistics.

    TOTAL and REFUSED are requests, each one event. The others are parts of one: they go to rows of their own and not into
    locust's row "Aggregated", which so counts every request once.
    """
    for row, seconds in stream.rows(error):
        if row not in (TOTAL, REFUSED):
            environment.stats.get(name, row).log(seconds * 1000, 0)
            continue
        environment.events.request.fire(
            request_type=row,
            name=name,
            response_time=seconds * 1000,
            response_length=stream.tokens,
            exception=error if row == TOTAL else None,
            context={},
        )


def three_digits(milliseconds: float) -> float:
    """A key of locust's histograms. Its own keys are whole milliseconds, too coarse for the time of a token."""
    return float(f"{milliseconds:.3g}")
