"""What a benchmark found: quantities measured several times, in turns, shown as medians with a 95 % interval, and filed."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loadtest.provenance import provenance

HEADER = ("what", "median", "interval", "unit")
T = TypeVar("T")


def interval(values: Sequence[float], sureness: float = 0.95) -> tuple[float, float]:
    """Two of the values between which the true median lies, however they are distributed.

    As many are left out on either side as `sureness` allows: none below 6 values, where even the whole range is less sure
    than 95 % (5 values: 94 %).
    """
    ordered, left_out, outside = sorted(values), 0, 0.0
    for count in range(len(ordered) // 2):
        outside += 2 * math.comb(len(ordered), count) / 2 ** len(ordered)
        if outside > 1 - sureness:
            break
        left_out = count
    return ordered[left_out], ordered[-1 - left_out]


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """The quotients of neighbours: what two contestants who took turns did in the same turn, as far as both had one."""
    return tuple(a / b for a, b in zip(above, below, strict=False))


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity: one value of `values` or more, in `unit`."""

    what: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def cells(self) -> tuple[str, ...]:
        """A row under HEADER."""
        low, high = interval(self.values)
        spread = f"{low:.4g} to {high:.4g}" if len(self.values) > 1 else ""
        return self.what, f"{self.median:.4g}", spread, self.unit

    def short(self) -> str:
        """A ratio in a cell: the median, and the interval."""
        low, high = interval(self.values)
        return f"{self.median:.2f} ({low:.2f} to {high:.2f})"

    def document(self) -> dict[str, Any]:
        """The same for a machine, with every value."""
        low, high = interval(self.values)
        found = {"what": self.what, "unit": self.unit, "median": self.median, "low": low, "high": high}
        return found | {"values": list(self.values)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A quantity of several contestants who took turns, in `unit`: a value of each for each turn. The first is ours."""

    what: str
    unit: str
    values: Mapping[str, Sequence[float]]

    def figure(self, name: str) -> Figure:
        """What one contestant reached."""
        return Figure(f"{self.what}, {name}", self.unit, tuple(self.values[name]))

    def ratio(self, other: str) -> Figure:
        """The first over another, turn by turn."""
        first = next(iter(self.values))
        return Figure(f"{self.what}, {first} / {other}", "ratio", ratios(self.values[first], self.values[other]))

    def figures(self) -> list[Figure]:
        """Every contestant, and the first over each other one where the other is never 0."""
        return [self.figure(name) for name in self.values] + [self.ratio(name) for name in self.others()]

    def others(self) -> list[str]:
        """The contestants that the first can be divided by."""
        return [name for name, values in list(self.values.items())[1:] if all(values)]

    def cells(self) -> tuple[str, ...]:
        """The median of each contestant, and the first over each other one."""
        medians = [f"{self.figure(name).median:.4g}" for name in self.values]
        return (*medians, *(self.ratio(name).short() if name in self.others() else "" for name in list(self.values)[1:]))


async def take_turns(
    contestants: Mapping[str, Callable[[], Awaitable[T]]],
    turns: int,
    warm_up: int = 1,
    seconds: float = math.inf,
    *,
    values: dict[str, list[T]] | None = None,
    show: Callable[[T], str] | None = None,
) -> dict[str, list[T]]:
    """What each contestant measures in each turn after those to warm up; every other turn goes from the last to the first.

    Within so many seconds each has an equal share of the time: who is slow has fewer turns, at least one. If there is no time
    for more, that one is the turn to warm up. `values` has what there is when it is ended early; `show` is said of each value
    as it comes, on standard error.
    """
    found = {} if values is None else values
    spent = dict.fromkeys(contestants, 0.0)
    for turn in range(turns + warm_up):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            if turn and spent[name] * (1 + 1 / turn) > seconds / len(contestants):
                continue
            started = time.perf_counter()
            value = await contestants[name]()
            spent[name] += time.perf_counter() - started
            found[name] = [*(found[name] if turn > warm_up else ()), value]
            if show:
                print(f"{name}, turn {turn + 1} of {turns + warm_up}: {show(value)}", file=sys.stderr, flush=True)
    return {name: found[name] for name in contestants}


def options_of(document: str | None, turns: int | None = None) -> argparse.ArgumentParser:
    """The options that benchmarks share: --json, and --turns where `turns` is its default. `document` is that of --help."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    if turns is not None:
        parser.add_argument("--turns", type=int, default=turns, help=f"measurements of each (default {turns})")
    parser.add_argument("--json", type=Path, help="write the figures here too, with every value")
    return parser


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Report:
    """A table whose rows are printed and filed as soon as they are measured: who ends a run keeps what it has found.

    `seed`: 0 is that of the benchmarks that draw the same in each run. `servers`: what each said of itself (`identity`).
    """

    def __init__(
        self,
        path: Path | None,
        head: Sequence[str] = HEADER,
        *,
        bench: str,
        seed: int = 0,
        servers: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        self._path = path
        self._lines = table(head, ()).splitlines()
        self._found = {"bench": bench, "provenance": provenance(seed, servers or {}) if path else None, **facts}
        self._figures: list[dict[str, Any]] = []
        print("\n".join(self._lines), flush=True)

    def add(self, figures: Iterable[Figure], rows: Iterable[Sequence[str]] | None = None, **facts: Any) -> None:
        """Print the rows, those of the figures unless others are given, and write all that there is to the file."""
        figures = list(figures)
        lines = [f"| {' | '.join(row)} |" for row in (rows if rows is not None else (each.cells() for each in figures))]
        print("\n".join(lines), flush=True)
        self._lines += lines
        self._figures += [each.document() for each in figures]
        self._found |= facts
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(self._path.name + ".part")
            text = json.dumps(self._found | {"table": "\n".join(self._lines), "figures": self._figures}, indent=1)
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self._path)
