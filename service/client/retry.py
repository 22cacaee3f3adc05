"""Retry policy of the client: when to try again, after how long, and the answer so far.

Nothing here sends or receives. A client raises `TryFailed` where a try ends before its answer does.
"""

import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from attend.service.client.errors import Answer, DeadlinePassed, GaveUp, OtherFingerprint, Refused

SEED_BITS = 48
"""A seed of so many bits survives a JSON reader that keeps numbers as doubles."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How long a call may take, and how often it may be tried."""

    seconds: float = 600.0
    """For the whole call, all waits included."""
    tries: int = 10
    """In a row, without a new token. One that brings a token begins the count anew."""
    first_wait: float = 0.25
    """The most seconds before the second try; each further one may wait twice as long."""
    longest_wait: float = 8.0
    clock: Callable[[], float] = time.monotonic
    draw: random.Random = field(default_factory=random.SystemRandom)
    """Draws seeds and waits."""

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries must be at least 1; got {self.tries}")
        for name in ("seconds", "first_wait", "longest_wait"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")

    def wait(self, barren: int) -> float:
        """Seconds after so many tries without a token: any from 0 to a bound that doubles (full jitter)."""
        return self.draw.uniform(0.0, min(self.longest_wait, self.first_wait * 2.0 ** min(max(barren - 1, 0), 64)))


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to an answer."""

    text: str
    token_ids: tuple[int, ...]
    fingerprint: str
    finish_reason: str | None = None
    """With the last event."""
    stop_reason: str | int | None = None
    """With the last event: the stop string or stop token that ended the answer."""


class TryFailed(Exception):
    """A try ended before its answer did. `code` is the error's name where the server gave one."""

    def __init__(self, reason: str, *, again: bool, after: float = 0.0, code: str = "") -> None:
        super().__init__(reason)
        self.again = again
        """True if another try may fare better."""
        self.after = after
        """Seconds that the server asks to wait."""
        self.code = code


class Call:
    """One call over all its tries."""

    def __init__(self, policy: Policy, seed: int | None, received_tokens: Iterable[int] = ()) -> None:
        """`received_tokens` are tokens of the answer that the caller has from an earlier call."""
        self.seed = policy.draw.getrandbits(SEED_BITS) if seed is None else seed
        self.tries = 0
        self._policy = policy
        self._deadline = policy.clock() + policy.seconds
        self._before = tuple(received_tokens)
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._last: Delta | None = None
        self._barren = 0
        """Tries since the last one that brought a token."""

    @property
    def received_tokens(self) -> tuple[int, ...]:
        """All tokens that the caller has of the answer: the next try goes on after them."""
        return (*self._before, *self._token_ids)

    @property
    def is_complete(self) -> bool:
        """True if the answer is whole."""
        return self._last is not None and self._last.finish_reason is not None

    @property
    def answer(self) -> Answer:
        """The answer so far, or the whole one."""
        last = self._last or Delta("", (), "")
        text, fingerprint = "".join(self._texts), last.fingerprint or None
        return Answer(text, tuple(self._token_ids), self.seed, fingerprint, last.finish_reason, last.stop_reason, self.tries)

    def remaining(self) -> float:
        """Seconds that are left, above 0. Raises DeadlinePassed."""
        left = self._deadline - self._policy.clock()
        if left <= 0:
            raise DeadlinePassed(f"the call's {self._policy.seconds:g} s have passed", self.answer)
        return left

    def begin(self) -> None:
        """Count a try that is about to be made. Raises DeadlinePassed."""
        self.remaining()
        self.tries += 1
        self._barren += 1

    def take(self, delta: Delta) -> Delta:
        """Add what an event brought. Raises OtherFingerprint, and then the delta is no part of the answer; DeadlinePassed."""
        self.remaining()
        if self._last is not None and delta.fingerprint != self._last.fingerprint:
            texts = f"{delta.fingerprint!r}, but the answer began with {self._last.fingerprint!r}"
            raise OtherFingerprint(f"the server that resumes the answer has the system_fingerprint {texts}", self.answer)
        self._last = delta
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if delta.token_ids:
            self._barren = 0
        return delta

    def pause(self, failed: TryFailed) -> float:
        """Seconds to wait before the next try. Raises what the call ends with where there is none."""
        policy = self._policy
        if not failed.again:
            raise Refused(str(failed), self.answer, failed.code) from failed
        if self._barren >= policy.tries:
            raise GaveUp(f"{self._barren} tries in a row brought no new token; the last one: {failed}", self.answer) from failed
        wait = failed.after + policy.wait(self._barren)
        if wait >= self.remaining():
            text = f"the next try would come after the call's {policy.seconds:g} s; the last one: {failed}"
            raise DeadlinePassed(text, self.answer) from failed
        return wait


CUT = "the stream ended before its answer"


def resume(
    call: Call, attempt: Callable[[Call], Generator[Delta, None, None]], sleep: Callable[[float], None] = time.sleep
) -> Iterator[Delta]:
    """The deltas of an answer, over as many tries as it takes. `attempt` makes one. Raises CallFailed."""
    while not call.is_complete:
        try:
            call.begin()
            with closing(attempt(call)) as deltas:
                for delta in deltas:
                    yield call.take(delta)
            if not call.is_complete:
                raise TryFailed(CUT, again=True)
        except TryFailed as failed:
            if not call.is_complete:
                sleep(call.pause(failed))
        except DeadlinePassed:
            if not call.is_complete:
                raise
