"""What an attack is: a coroutine that goes on until it is cancelled or done. ATTACKS has all of them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.faults.attacker import Attacker

Run = Callable[[Attacker], Awaitable[None]]
KEYS = ("each", "shared", "none")
"""How callers are known: each by a key of its own, all by one key as behind a gateway, or without keys."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `about` is its line in the table."""

    about: str
    run: Run
    keys: tuple[str, ...] = KEYS
    """Where it makes sense."""
    fills: bool = False
    """Its calls are good ones that fill batch and queue. Callers who are one owner with it wait, and may be refused."""
    ends: bool = False
    """It is done with a few calls: where it is not, nothing was checked."""


ATTACKS: dict[str, Attack] = {}


def add(name: str, one: Attack) -> None:
    """Put an attack into ATTACKS. Raises ValueError where the name is taken."""
    if name in ATTACKS:
        raise ValueError(f"two attacks are called {name!r}")
    ATTACKS[name] = one


def attack(keys: tuple[str, ...] = KEYS, *, fills: bool = False, ends: bool = False) -> Callable[[Run], Run]:
    """Put a coroutine into ATTACKS under its name, with spaces; its docstring says what it is."""

    def put(run: Run) -> Run:
        add(run.__name__.replace("_", " "), Attack((run.__doc__ or "").strip(), run, keys, fills, ends))
        return run

    return put


@dataclass(frozen=True, slots=True)
class Flood:
    """The same POST again and again, `at_once` at a time. `body` is JSON, bytes, or a function that makes the next one."""

    about: str
    path: str
    body: Any
    at_once: int
    keys: tuple[str, ...] = KEYS
    fills: bool = False
    key: str = "open"
    headers: Mapping[str, str] | None = None

    async def run(self, a: Attacker) -> None:
        """Send it until it is cancelled."""

        async def one() -> None:
            body = self.body() if callable(self.body) else self.body
            await a.post(self.path, body, self.key, **(self.headers or {}))

        await a.repeat(one, self.at_once)


def add_floods(floods: Mapping[str, Flood]) -> None:
    """Put a table of floods into ATTACKS."""
    for name, one in floods.items():
        add(name, Attack(one.about, one.run, one.keys, one.fills))


def sensible(names: Sequence[str], keys: str) -> list[str]:
    """The attacks among `names` that make sense where callers are known in this way."""
    return [name for name in names if name in ATTACKS and keys in ATTACKS[name].keys]
