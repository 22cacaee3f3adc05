"""Rate limits of an API key at one replica: requests and tokens a minute, concurrent answers.

A call is charged in three steps, each as soon as its amount is known and before more work is done for it: one request when
it arrives, a place for each of its answers once it is read, and its tokens once they are counted.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import Lock

from attend.model.errors import InvalidRequest, RateLimited
from attend.model.params import DEFAULT_PRIORITY

WINDOW_SECONDS = 60.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may take of one replica; None is no limit."""

    requests_per_minute: int | None = None
    """Calls that arrived, refused ones too, except those that a limit of the key refused."""
    tokens_per_minute: int | None = None
    """Of prompts and answers; an answer pays for its prompt too."""
    concurrent: int | None = None
    """Answers being made: a call for `n` answers to each of its prompts takes `n` x prompts."""


LIMITS = tuple(limit.name for limit in fields(Limits))


@dataclass(frozen=True, slots=True)
class Share:
    """How one key stands beside the others."""

    max_priority: int | None = None
    """The highest `priority` that its calls may have; None is no limit."""
    weight: float = 1.0
    """Its share of the engine while others wait too: a key of weight 2 has twice as much as one of weight 1."""
    share_prefixes: str | None = None
    """The group of keys that share cached prefixes; None: the key shares them with no other."""


SHARES = tuple(part.name for part in fields(Share))


@dataclass(slots=True, eq=False)
class _Charge:
    leaves: float
    amount: int


class _Window:
    """What was taken in the last minute. Each charge leaves a minute after it was made, so no minute ever holds more than
    the limit; a token bucket would let twice as much through around its edge."""

    def __init__(self) -> None:
        self.charges: deque[_Charge] = deque()
        self.spent = 0

    def wait(self, amount: int, limit: int | None, now: float) -> float:
        """Seconds until `amount` fits; 0 where it fits now, or is nothing. `amount` is at most the limit."""
        while self.charges and self.charges[0].leaves <= now:
            gone = self.charges.popleft()
            self.spent -= gone.amount
            gone.amount = 0
        if limit is None or not amount:
            return 0.0
        excess, leaves = self.spent + amount - limit, now
        for charge in self.charges:
            if excess <= 0:
                break
            excess, leaves = excess - charge.amount, charge.leaves
        return leaves - now

    def take(self, amount: int, now: float) -> _Charge:
        """Charge `amount`, to be settled later."""
        charge = _Charge(now + WINDOW_SECONDS, amount)
        self.charges.append(charge)
        self.spent += amount
        return charge

    def settle(self, charge: _Charge, actual_amount: int) -> None:
        """Give back what a charge did not use; one that has left the window has nothing to give."""
        back = max(0, charge.amount - actual_amount)
        charge.amount -= back
        self.spent -= back


class KeyUsage:
    """What one name has used; it outlives a change of its key or its limits."""

    def __init__(self) -> None:
        self.lock = Lock()  # a route's dependency may run in a worker thread
        self.requests = _Window()
        self.tokens = _Window()
        self.running = 0
        """Answers that are being generated now."""


class Lease:
    """The share of its key that one call holds. When the call ends, what it reserved and did not use is given back."""

    def __init__(self, key: "Key") -> None:
        self._key = key
        self._charge: _Charge | None = None
        self.reserved = 0
        """Tokens that the call may take at most."""
        self.used = 0
        """Tokens that it has taken so far."""

    def reserve(self, tokens: int) -> None:
        """Charge the most tokens that the call may take, once. Raises RateLimited, or InvalidRequest where they never fit."""
        assert tokens >= 0 and self._charge is None
        self._charge = self._key.charge(tokens)
        self.reserved = tokens

    def use(self, tokens: int) -> None:
        """The call has taken so many tokens more."""
        assert tokens >= 0
        self.used += tokens

    def end(self) -> None:
        """Give back what was not used."""
        if self._charge is not None:
            self._key.settle(self._charge, self.used)


class Key:
    """A known caller. `name` is fit for logs; the key itself is not kept."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        usage: KeyUsage | None = None,
        clock: Clock = time.monotonic,
        share: Share = Share(),
    ) -> None:
        self.name = name
        self.limits = limits
        self.share = share
        self.usage = KeyUsage() if usage is None else usage
        self._clock = clock

    def priority(self, requested_priority: int | None) -> int:
        """The priority of a call that asks for this one, or for none. Raises InvalidRequest where the key may not have it."""
        most = self.share.max_priority
        if most is None:
            return DEFAULT_PRIORITY if requested_priority is None else requested_priority
        if requested_priority is not None and requested_priority > most:
            raise InvalidRequest(
                f"priority must be at most {most}, the max_priority of API key {self.name!r}; got {requested_priority}",
                "priority",
            )
        return min(DEFAULT_PRIORITY, most) if requested_priority is None else requested_priority

    def is_busy(self, share: float) -> bool:
        """True if its calls have taken so much of one of its limits: then it has none of that to spare for batches."""
        usage, limits = self.usage, self.limits
        with usage.lock:
            now = self._clock()
            pairs = [(usage.running, limits.concurrent)]
            for window, limit in ((usage.requests, limits.requests_per_minute), (usage.tokens, limits.tokens_per_minute)):
                window.wait(0, limit, now)  # forget what left
                pairs.append((window.spent, limit))
        return any(limit is not None and taken >= limit * share for taken, limit in pairs)

    def arrive(self, answers: int = 1) -> None:
        """Charge one request, before its body is read. Raises RateLimited, and takes nothing, where there is no room for it."""
        with self.usage.lock:
            now = self._clock()
            self._check(now, requests=1, answers=answers)
            self.usage.requests.take(1, now)

    @contextmanager
    def admit(self, answers: int, tokens: int = 0) -> Iterator[Lease]:
        """Hold a place for each answer of one call, which will reserve `tokens` at least. Raises RateLimited or
        InvalidRequest.
        """
        most = self.limits.concurrent
        if most is not None and answers > most:
            whose = f"the limit concurrent of API key {self.name!r}"
            raise InvalidRequest(f"n times the number of prompts must be at most {most}, {whose}; got {answers}", "n")
        self._check_size(tokens)
        with self.usage.lock:
            self._check(self._clock(), answers=answers, tokens=tokens)
            self.usage.running += answers
        lease = Lease(self)
        try:
            yield lease
        finally:
            with self.usage.lock:
                self.usage.running -= answers
            lease.end()

    def charge(self, tokens: int) -> _Charge:
        """Charge tokens. See `Lease.reserve`."""
        self._check_size(tokens)
        with self.usage.lock:
            now = self._clock()
            self._check(now, tokens=tokens)
            return self.usage.tokens.take(tokens, now)

    def settle(self, charge: _Charge, actual_amount: int) -> None:
        """Give back what a charge of tokens did not use."""
        with self.usage.lock:
            self.usage.tokens.settle(charge, actual_amount)

    def _check_size(self, tokens: int) -> None:
        most = self.limits.tokens_per_minute
        if most is not None and tokens > most:
            whose = f"the tokens_per_minute of API key {self.name!r}"
            raise InvalidRequest(f"prompt plus max_tokens must be at most {most}, {whose}; got {tokens}", "max_tokens")

    def _check(self, now: float, requests: int = 0, answers: int = 0, tokens: int = 0) -> None:
        limits, usage = self.limits, self.usage
        full = limits.concurrent is not None and answers and usage.running + answers > limits.concurrent
        waits = {
            "concurrent": 1.0 if full else 0.0,
            "requests_per_minute": usage.requests.wait(requests, limits.requests_per_minute, now),
            "tokens_per_minute": usage.tokens.wait(tokens, limits.tokens_per_minute, now),
        }
        limit = max(waits, key=waits.__getitem__)
        if waits[limit] > 0:
            seconds = max(1, math.ceil(waits[limit]))
            raise RateLimited(
                f"API key {self.name!r} has reached its limit {limit} = {getattr(limits, limit)}; try again in {seconds} s",
                retry_after=seconds,
                reason=f"key_{limit.removesuffix('_per_minute')}",
            )
