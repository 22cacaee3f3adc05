"""A transport that fails on purpose: an answer known beforehand, and what becomes of each try for it."""

import random
from collections.abc import Generator
from dataclasses import dataclass, field

from attend.service.client.retry import Call, Delta, Policy, TryFailed

SEED = 7
CHARACTERS = "aäß漢🎉"


@dataclass(frozen=True)
class Try:
    """One try: it takes `seconds` before it begins, gives events of so many tokens each, and ends with `end`.

    An answer that is whole before that ends by itself.
    """

    events: tuple[int, ...] = ()
    end: TryFailed | None = None
    """None is a stream that ends as if it were whole."""
    seconds: float = 0.0
    fingerprint: str = "fp"


WHOLE = Try((1,) * 1000)


@dataclass
class World:
    """A clock that moves only where somebody waits, and a server that does what `tries` say, then answers."""

    length: int = 5
    tries: list[Try] = field(default_factory=list)
    now: float = 100.0
    begun: list[tuple[int, ...]] = field(default_factory=list)
    """What each try was asked to go on after."""
    waits: list[float] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)

    def policy(self, draw: random.Random | None = None, **limits: float) -> Policy:
        return Policy(**limits, clock=lambda: self.now, draw=draw or random.Random(1))

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def attempt(self, call: Call) -> Generator[Delta, None, None]:
        """One try."""
        plan = self.tries[len(self.begun)] if len(self.begun) < len(self.tries) else WHOLE
        self.begun.append(call.received_tokens)
        self.seeds.add(call.seed)
        assert call.received_tokens == self.tokens(call.seed)[: len(call.received_tokens)]
        self.now += min(plan.seconds, call.remaining())
        call.remaining()
        yield from self._events(plan, call)
        if plan.end is not None:
            raise plan.end

    def _events(self, plan: Try, call: Call) -> Generator[Delta, None, None]:
        at, tokens = len(call.received_tokens), self.tokens(call.seed)
        for size in plan.events:
            part = tokens[at : at + size]
            at += len(part)
            last = at == len(tokens)
            yield Delta(self.text(part), part, plan.fingerprint, "length" if last else None)
            if last:
                return

    def tokens(self, seed: int) -> tuple[int, ...]:
        """The uncut answer."""
        return tuple(random.Random(seed).choices(range(len(CHARACTERS)), k=self.length))

    def text(self, tokens: tuple[int, ...]) -> str:
        return "".join(CHARACTERS[token] for token in tokens)


CUT = TryFailed("reset", again=True)
