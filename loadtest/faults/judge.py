"""What must hold for a server's other callers while it is attacked, and for the server itself."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.faults.neighbours import Observation

SLOWER = 4.0
"""The streams may be so many times slower than without the attack. A fair half of two cores, with a batch of 64 in place of 8,
leaves them a third; the attacker's own client takes some of the cores too."""
LEAST_GAP, TIMES_QUIET = 0.25, 3.0
"""A gap may be so many seconds, or so many times that of the quiet stretch before."""
LEAST_P99 = 0.1
CHAT_SECONDS = 2.0
"""For a chat of one word."""
REFUSED_SECONDS = 0.05
MEMORY = 768 << 20
"""Bytes more than before, at any time of the attack."""
FILES = 24
"""Open files more than before, once it is over: those of the neighbours come and go."""
AFTERWARDS = 3.0
"""The streams may be so many times slower after it than before: other work of the machine changes their pace too."""


@dataclass(frozen=True, slots=True)
class Measure:
    """`value` in `unit` of `what`, which should be at most `most`; None is no limit. `note` says what was seen."""

    what: str
    value: float
    unit: str = ""
    most: float | None = None
    note: str = ""

    @property
    def within_limit(self) -> bool:
        """True if the value is within its limit."""
        return self.most is None or self.value <= self.most

    def text(self) -> str:
        """The value with its unit, and the limit."""
        value = "never" if math.isinf(self.value) else f"{self.value:.3g}"
        limit = "" if self.most is None or self.value == self.most == 0 else f" (at most {self.most:.3g})"
        return f"{self.what} {value}{' ' + self.unit if self.unit else ''}{limit}"


def times(value: float, of: float) -> float:
    """How many times `of` is in `value`."""
    return value / of if of else float("inf")


def first_lines(what: Sequence[str]) -> str:
    """Some of many lines."""
    return ", ".join(sorted(set(what)))[:300]


def streams(quiet: Observation, observation: Observation, *, may_refuse: bool) -> list[Measure]:
    """The neighbours' streams and chats. With `may_refuse` their own owner fills the queue: their pace is not judged then."""
    gap, p99 = max(LEAST_GAP, TIMES_QUIET * quiet.longest_gap()), max(LEAST_P99, TIMES_QUIET * quiet.p99_gap())
    chat = max(CHAT_SECONDS, TIMES_QUIET * max(quiet.chats, default=0.0))
    slower = times(quiet.speed(), observation.speed())
    nobody = may_refuse and not observation.gaps
    return [
        Measure("streams slower, times", slower, "", None if may_refuse else SLOWER, f"quiet {quiet.speed():.0f} events/s"),
        Measure(
            "p99 gap", observation.p99_gap() * 1e3, "ms", None if nobody else p99 * 1e3, f"quiet {quiet.p99_gap() * 1e3:.0f} ms"
        ),
        Measure("largest gap", observation.longest_gap() * 1e3, "ms", None if nobody else gap * 1e3),
        Measure("longest chat", max(observation.chats, default=float("inf")) * 1e3, "ms", None if may_refuse else chat * 1e3),
        Measure("longest first token", max(observation.firsts, default=0.0) * 1e3, "ms"),
        Measure("turned away", observation.turned_away, "", None if may_refuse else 0),
        Measure("broken", len(observation.failed), "", 0, first_lines(observation.failed)),
        Measure("probes lost", len(observation.lost_probes), "", 0, first_lines(observation.lost_probes)),
        Measure("longest probe", max(observation.probes, default=float("inf")) * 1e3, "ms"),
    ]


def refusals(observation: Observation, *, is_attacker: bool = False) -> list[Measure]:
    """The key that is at its limit. Where it attacks itself, only its own callers wait."""
    most = None if is_attacker else REFUSED_SECONDS * 1e3
    return [
        Measure("limited key refused, median", statistics.median(observation.refusals or [float("inf")]) * 1e3, "ms", most),
        Measure("limited key refused, longest", max(observation.refusals, default=float("inf")) * 1e3, "ms"),
    ]


def server(memory: float, files: float, again: float, most_seconds: float) -> list[Measure]:
    """The server: bytes more than before, open files that did not come back, seconds until it answered."""
    return [
        Measure("memory", memory / (1 << 20), "MiB", MEMORY / (1 << 20)),
        Measure("open files left", files, "", FILES),
        Measure("answering again", again, "s", most_seconds),
    ]


def afterwards(quiet: Observation, after: Observation) -> list[Measure]:
    """A quiet stretch after the attack beside the one before it."""
    bad = [*after.failed, *after.lost_probes, *["turned away"] * after.turned_away]
    return [
        Measure("streams slower afterwards, times", times(quiet.speed(), after.speed()), "", AFTERWARDS),
        Measure("broken afterwards", len(bad), "", 0, first_lines(bad)),
    ]
