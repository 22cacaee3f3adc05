"""What a benchmark found: a named quantity measured several times, shown as its median and quartiles."""

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEADER = "| what | median | quartiles | unit | target |\n| --- | --- | --- | --- | --- |"


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity: one value of `values` or more, in `unit`. Its median should be at most `most`, where that is given."""

    what: str
    unit: str
    values: tuple[float, ...]
    most: float | None = None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The first quartile, the median, the third quartile."""
        if len(self.values) == 1:
            return self.values * 3
        low, middle, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, middle, high

    def row(self) -> str:
        """A row under HEADER."""
        low, middle, high = (f"{value:.4g}" for value in self.quartiles)
        target = "" if self.most is None else f"at most {self.most:g}"
        return f"| {self.what} | {middle} | {low} to {high} | {self.unit} | {target} |"

    def document(self) -> dict[str, Any]:
        """The same for a machine, with every value."""
        low, middle, high = self.quartiles
        found = {"what": self.what, "unit": self.unit, "median": middle, "q1": low, "q3": high, "most": self.most}
        return found | {"values": list(self.values)}


async def take_turns(contestants: Mapping[str, Callable[[], Awaitable[float]]], turns: int) -> dict[str, list[float]]:
    """What each contestant measures in each turn, after one turn to warm up."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, measure in contestants.items():
            value = await measure()
            if turn:
                found[name].append(value)
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """The quotients of neighbours: what two contestants who took turns did in the same turn."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    """The `percent`-th percentile of at least one value: a stalled phase may have no more."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
