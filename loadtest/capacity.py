"""`make capacity`: the highest rate of requests that keeps the objectives, by bisection over short open-loop runs."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from loadtest.load import OUT, locust
from loadtest.options import add_seed
from loadtest.server import Address, StartError, ready_server
from loadtest.slo import MISSED

COLUMNS = "rate/s  answers/s  tokens/s  TTFT p95 ms  ITL p95 ms  failed  refused  objectives"


def highest(keeps: Callable[[int], bool], first: int, most: int, precision: float) -> tuple[int, int | None]:
    """The highest rate found that keeps, 0 for none, and the lowest found that does not, None for none.

    Doubles from `first` until one does not keep, then halves the gap until it is 1 or `precision` of the higher rate.
    """
    low, high, rate = 0, None, min(first, most)
    while high is None and low < most:
        low, high = (rate, None) if keeps(rate) else (low, rate)
        rate = min(2 * rate, most)
    while high is not None and high - low > max(1, precision * high):
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low, high


class Trial:
    """One short run at a rate, in units of `source_rate` requests a second; prints its line of the table.

    Each has the next seed: the prompts of the one before are in the server's cache.
    """

    def __init__(
        self, address: Address, out: Path, seconds: int, source_rate: float, arguments: Sequence[str], seed: int
    ) -> None:
        self.address, self.out, self.source_rate = address, out, source_rate
        self.arguments = [*("--loop", "open", "--stop-timeout", "30", "-t", f"{seconds}s"), *arguments]
        self.arguments += ["--source-rate", str(source_rate)]
        self.seeds = count(seed)

    def __call__(self, users: int) -> bool:
        """True if the objectives were kept. Raises RuntimeError where locust itself failed."""
        (self.out / "summary.json").unlink(missing_ok=True)
        size = ["-u", str(users), "-r", str(users), "--seed", str(next(self.seeds))]
        code = locust(self.address, self.out, [*self.arguments, *size], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if code not in (0, MISSED):
            raise RuntimeError(f"locust ended with {code}; run it by hand to see why: see loadtest/README.md")
        summary = json.loads((self.out / "summary.json").read_text(encoding="utf-8"))
        print(line(users * self.source_rate, summary), flush=True)
        return code == 0


def line(rate: float, summary: dict[str, Any]) -> str:
    """A line of the table; of the transports the slower one."""
    phase = (summary["phases"] or [{"answers_per_s": 0.0, "tokens_per_s": 0.0}])[-1]
    p95 = [max((each[name]["p95"] or 0.0 for each in summary["transports"].values()), default=0.0) for name in ("TTFT", "ITL")]
    verdict = "; ".join(summary["missed"]) or "kept"
    return (
        f"{rate:>6g}  {phase['answers_per_s']:>9.1f}  {phase['tokens_per_s']:>8.0f}  {p95[0]:>11.0f}  {p95[1]:>10.1f}"
        f"  {summary['failed']:>6}  {summary['refused']:>7}  {verdict}"
    )


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and the rest, which is locust's."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.capacity", description=__doc__, epilog="Other options go to locust."
    )
    parser.add_argument("--first", type=int, default=4, help="rate of the first trial (default 4)")
    parser.add_argument("--most", type=int, default=512, help="highest rate to try (default 512)")
    parser.add_argument("--precision", type=float, default=0.05, help="gap to stop at, as a share of the rate (default 0.05)")
    parser.add_argument("--seconds", type=int, default=15, help="length of a trial (default 15)")
    parser.add_argument("--source-rate", type=float, default=1.0, help="unit of the rates in requests a second (default 1)")
    parser.add_argument("--host", help="URL of a running service; default: start one")
    parser.add_argument("--grpc-host", default="127.0.0.1:9000", help="its gRPC address (default 127.0.0.1:9000)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the log and the last trial's report")
    add_seed(parser)
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0 with an answer, 1 where not even the first rate was kept or nothing could be measured."""
    options, rest = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    own = ready_server(options.out / "server.log")
    with nullcontext(Address(options.host, options.grpc_host)) if options.host else own as address:
        trial = Trial(address, options.out, options.seconds, options.source_rate, rest, options.seed)
        print(COLUMNS, flush=True)
        kept, missed = highest(trial, options.first, options.most, options.precision)
    if not kept:
        print(f"No rate was kept, not even {missed * options.source_rate:g} requests/s.")
        return 1
    beyond = f"{missed * options.source_rate:g} misses them" if missed else "the highest that was tried"
    print(f"Capacity: {kept * options.source_rate:g} requests/s keep the objectives; {beyond}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (StartError, RuntimeError) as error:
        sys.exit(str(error))
