"""Two reports side by side, with intervals: python -m loadtest.compare A B

A and B are folders of `--report`, or JSON files: summary.json of a load, or --json of the same benchmark. The table shows each
measure that both have, B over A, and the 95 % interval of that ratio: a bootstrap with a seed of its own, over the turns of a
benchmark, over the answers of a load, and for its rates over its phases. A ratio whose interval excludes 1 is marked. Where
there are too few values there is no interval. What the makings of both reports do not share stands below. Ends with 2 where a
report cannot be read or is of another kind.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.bench.figures import table
from loadtest.measures import PERCENTILES
from loadtest.stream import ITL, TOTAL

RESAMPLES, SEED, SURENESS = 2000, 0, 0.95
FEWEST, BEYOND = 5, 2
"""Turns or phases, and values beyond a percentile, below which an interval would say too little."""
RATES = ("answers_per_s", "tokens_per_s")
COUNTS = ("answers", "failed", "refused")


class ReportError(Exception):
    """A report that cannot be read, or compared with the other."""


@dataclass(frozen=True, slots=True)
class Line:
    """A measure of both. `low`, `high`: the interval of B over A, where there are values enough."""

    what: str
    unit: str
    a: float
    b: float
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """B over A."""
        return self.b / self.a if self.a else None

    @property
    def differs(self) -> bool:
        """True if the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        interval = "" if self.low is None else f"{self.low:.3f} to {self.high:.3f}"
        return self.what, self.unit, f"{self.a:.4g}", f"{self.b:.4g}", ratio, interval, "differs" if self.differs else ""


def read(path: Path) -> dict[str, Any]:
    """A report: of a load, which has `times` and `phases`, or of a benchmark, which has `bench`. Raises ReportError."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict) or not (is_bench(found) or {"times", "phases"} <= found.keys()):
        raise ReportError(f"{file} is no report of a load or a benchmark, or of a version before they had values to compare")
    return found


def is_bench(report: Mapping[str, Any]) -> bool:
    """True if it is one of a benchmark."""
    return {"bench", "figures"} <= report.keys()


def compare_reports(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Line]:
    """What both have. Raises ReportError where they are of different kinds."""
    kinds = [f"of attend bench {each['bench']}" if is_bench(each) else "of a load" for each in (a, b)]
    if kinds[0] != kinds[1]:
        raise ReportError(f"A is a report {kinds[0]}, B one {kinds[1]}")
    try:
        found = list(_of_bench(a, b) if is_bench(a) else _of_load(a, b))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ReportError(f"one of them is no report that Attend wrote: {error!r}") from None
    if not found:
        raise ReportError("the reports have no measure in common")
    return found


def _of_bench(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Line]:
    """Each figure of both; medians over the turns."""
    others = {(figure["what"], figure["unit"]): figure["values"] for figure in b["figures"]}
    for figure in a["figures"]:
        values = figure["values"], others.get((figure["what"], figure["unit"]), ())
        if values[1]:
            drawn = [_medians(np.array(each), at) for at, each in enumerate(values)]
            low, high = _bounds(*drawn) if min(map(len, values)) >= FEWEST else (None, None)
            one, other = (float(np.median(each)) for each in values)
            yield Line(figure["what"], figure["unit"], one, other, low, high)


def _of_load(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Line]:
    """Rates over phases with as many users, percentiles of each transport, counts."""
    both = [{phase["users"]: phase for phase in each["phases"]} for each in (a, b)]
    users = [each for each in both[0] if each in both[1]]
    for name in RATES if users else ():
        pairs = np.array([[phases[each][name] for each in users] for phases in both])
        one, other = pairs.mean(axis=1)
        yield Line(name, "a second", one, other, *_paired_bounds(pairs))
    for transport, measures in a["times"].items():
        for name in measures:
            histograms = [_histogram(each, transport, name) for each in (a, b)]
            if all(len(values) for values, _, _ in histograms):
                yield from _of_times(f"{transport} {name}", histograms)
    yield from (Line(name, "requests", a[name], b[name]) for name in COUNTS)


Histogram = tuple[NDArray[np.float64], NDArray[np.float64], int]
"""Milliseconds in their order, how often each came, and of how many answers."""


def _histogram(report: Mapping[str, Any], transport: str, measure: str) -> Histogram:
    of_transport = report["times"].get(transport, {})
    times = sorted((float(key), count) for key, count in of_transport.get(measure, {}).items())
    answers = sum(of_transport.get(TOTAL, {}).values())
    return np.array([key for key, _ in times]), np.array([float(count) for _, count in times]), answers


def _of_times(what: str, histograms: Sequence[Histogram]) -> Iterator[Line]:
    """Percentiles. The gaps within an answer are not independent, so a resample has as many of them as there were answers."""
    drawn = []
    for at, (_, counts, answers) in enumerate(histograms):
        size = min(answers, int(counts.sum())) if what.endswith(ITL) else int(counts.sum())
        dice = np.random.default_rng((SEED, at))
        drawn.append(dice.multinomial(max(1, size), counts / counts.sum(), RESAMPLES).cumsum(axis=1))
    for percent in PERCENTILES:
        values = [_rank(keys, counts.cumsum()[None], percent)[0] for keys, counts, _ in histograms]
        resampled = [_rank(keys, sums, percent) for (keys, _, _), sums in zip(histograms, drawn, strict=True)]
        beyond = min(float(sums[0, -1]) for sums in drawn) * (1 - percent / 100)
        low, high = _bounds(*resampled) if beyond >= BEYOND else (None, None)
        yield Line(f"{what} p{percent}", "ms", values[0], values[1], low, high)


def _rank(keys: NDArray[np.float64], sums: NDArray[Any], percent: int) -> NDArray[np.float64]:
    """The nearest rank of each row of cumulated counts."""
    found: NDArray[np.float64] = keys[(sums < percent / 100 * sums[:, -1:]).sum(axis=1)]
    return found


def _medians(values: NDArray[np.float64], at: int) -> NDArray[np.float64]:
    """Of resamples of the values of one report."""
    dice = np.random.default_rng((SEED, at))
    found: NDArray[np.float64] = np.median(dice.choice(values, (RESAMPLES, len(values))), axis=1)
    return found


def _paired_bounds(pairs: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The interval of the quotient of the means of two rows whose columns belong together."""
    if pairs.shape[1] < FEWEST:
        return None, None
    picks = np.random.default_rng(SEED).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    return _bounds(*pairs[:, picks].mean(axis=2))


def _bounds(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The interval of B over A, of resamples of both."""
    if not (a > 0).all():
        return None, None
    low, high = np.quantile(b / a, [(1 - SURENESS) / 2, (1 + SURENESS) / 2])
    return float(low), float(high)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A sentence for each part of the making that the reports do not share."""
    makings = [_making(each) for each in (a, b)]
    names = dict.fromkeys([*makings[0], *makings[1]])
    pairs = [(name, *(making.get(name) for making in makings)) for name in names]
    return [f"{name}: {one!r} in A, {other!r} in B" for name, one, other in pairs if one != other]


def _making(report: Mapping[str, Any]) -> dict[str, Any]:
    """What should be equal, by its name."""
    about = report.get("provenance", {})
    found = {"attend": about.get("attend"), "seed": about.get("seed")}
    found |= {f"machine, {name}": value for name, value in about.get("machine", {}).items()}
    for name, server in about.get("servers", {}).items():
        found |= {f"{name}, {what}": server.get(what) for what in ("model", "version", "fingerprint")}
    return found | {f"load, {name}": value for name, value in report.get("load", {}).items()}


def main(words: list[str] | None = None) -> None:
    """Print the table, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="the report that is divided by")
    parser.add_argument("b", type=Path, metavar="B", help="the other")
    parser.add_argument("--json", type=Path, help="write the lines here too")
    options = parser.parse_args(words)
    try:
        a, b = read(options.a), read(options.b)
        lines = compare_reports(a, b)
    except ReportError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(table(("what", "unit", "A", "B", "B / A", "interval", ""), (line.cells() for line in lines)))
    found = differences(a, b)
    print("\n".join(["", *(f"not the same: {each}" for each in found)]) if found else "")
    if options.json:
        document = [asdict(line) | {"ratio": line.ratio, "differs": line.differs} for line in lines]
        options.json.write_text(json.dumps({"lines": document, "not_the_same": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
