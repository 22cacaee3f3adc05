"""Throughput of the engine beside its peers, in-process, on the same random weights: attend bench engine --shape S

W1: one request, 128 -> 128 tokens, decode tokens/s. W2: 16 at once, output tokens/s. W3: a prompt of 1024 tokens, prompt
tokens/s. Greedy, end-of-text ignored. Each contestant is a process of its own, which stands still while others have their
turn; the roofline is measured between two of them, for weights in bfloat16. A ratio is the median of the quotients of
neighbours. With --weights int8,int4 each side keeps the weights in its own form of so many bits. With --sampled Attend stands
beside itself, sampling with temperature 0.7 and top_p 0.95.

A peer that is installed in another environment: --python openvino=/path/to/venv/bin/python
"""

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from attend.model.shapes import SHAPES
from loadtest.bench.contestant import FORMS, OURS, PACKAGES, TREE, Contestant, PeerError, is_installed, start_all
from loadtest.bench.figures import Comparison, Figure, Report, options_of, take_turns
from loadtest.bench.machine import Neighbours
from loadtest.bench.shapes import AT_ONCE, FOLDER, LONG, OUTPUT, PROMPT, parameters, write_shape

Run = Callable[..., float]
"""(requests, prompt tokens, output tokens) -> seconds."""
Work = Callable[[Run], float]
"""A work's tokens/s."""
COPIES, CACHE = 3, 2 << 30
"""A contestant takes so many times the weights' bytes while it loads, and then a cache."""


def w1(run: Run) -> float:
    """Decode tokens/s of one stream: the first token's time is taken away."""
    first = run(1, PROMPT, 1)
    return (OUTPUT - 1) / (run(1, PROMPT, OUTPUT) - first)


def w2(run: Run) -> float:
    """Output tokens/s of 16 at once."""
    return AT_ONCE * OUTPUT / run(AT_ONCE, PROMPT, OUTPUT)


def w3(run: Run, runs: int = 3) -> float:
    """Prompt tokens/s of a long prompt: the median of so many."""
    return LONG / statistics.median(run(1, LONG, 1) for _ in range(runs))


WORKS: dict[str, Work] = {"W1": w1, "W2": w2, "W3": w3}


async def turn(work: Work, run: Run, neighbours: Neighbours) -> float:
    """One measurement."""
    value = work(run)
    neighbours.lap()
    return value


def compare(
    contestants: Mapping[str, Run],
    pairs: int,
    neighbours: Neighbours,
    seconds: float = math.inf,
    works: Mapping[str, Work] = WORKS,
    warm_up: int = 1,
) -> list[Comparison]:
    """Every work in turns, within so many seconds; the first turns of each warm up."""
    found, end = [], time.perf_counter() + seconds
    for left, (name, work) in zip(range(len(works), 0, -1), works.items(), strict=True):
        turns = {each: partial(turn, work, contestant, neighbours) for each, contestant in contestants.items()}
        share = (end - time.perf_counter()) / left
        found.append(Comparison(name, "tokens/s", asyncio.run(take_turns(turns, pairs, warm_up, share))))
    return found


def check_memory(shape: str, contestants: int, weights: str = "bf16") -> None:
    """Raises PeerError where so many processes with this model do not fit beside each other."""
    copies = COPIES if weights == "bf16" else 1
    needed = contestants * (copies * 2 * parameters(shape) + CACHE)
    free = psutil.virtual_memory().available
    if needed > free:
        raise PeerError(f"{contestants} contestants of shape {shape} need {needed >> 30} GiB of memory; {free >> 30} are free")


def roofline(shape: str) -> dict[str, float]:
    """Tokens a second that no engine can beat, by work; measured in a process that leaves no threads behind."""
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        command = [sys.executable, "-m", "loadtest.bench.limits", "--shape", shape, "--json", found.name]
        subprocess.run(command, cwd=TREE, check=True, stdout=subprocess.DEVNULL)
        figures = json.load(found)["figures"]
    limits = {figure["what"].removeprefix("roofline "): figure["median"] for figure in figures}
    return {work: limits[work] for work in WORKS}


HEAD = ("shape", "weights", "work", "Attend tok/s", "of bf16's roofline", "peers: tok/s, Attend's ratio")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one shape gave, with one form of weights."""

    shape: str
    weights: str
    comparisons: list[Comparison]
    limits: dict[str, float]
    facts: dict[str, Any]

    def rows(self) -> Iterator[list[str]]:
        """Cells: shape, form, work, ours with its share of the roofline of bfloat16, and each peer with the ratio."""
        for each in self.comparisons:
            mine, limit = self.ours(each).median, self.limits[each.what]
            others = (f"{name}: {each.figure(name).median:.0f}, {each.ratio(name).short()}" for name in each.others())
            yield [self.shape, self.weights, each.what, f"{mine:.0f}", f"{mine / limit:.0%} of {limit:.0f}", "; ".join(others)]

    def figures(self) -> Iterator[Figure]:
        """Everything, named after the shape."""
        for each in self.comparisons:
            share = tuple(value / self.limits[each.what] for value in self.ours(each).values)
            for found in (*each.figures(), Figure(f"{each.what}, share of the roofline", "ratio", share)):
                yield replace(found, what=f"{self.shape} {self.weights} {found.what}")

    @staticmethod
    def ours(comparison: Comparison) -> Figure:
        """What the first contestant reached."""
        return comparison.figure(next(iter(comparison.values)))


def bench_shape(
    shape: str, weights: str, peers: Mapping[str, str], options: argparse.Namespace, seconds: float = math.inf
) -> Outcome:
    """Every work of one shape, within so many seconds if one turn of each is not longer. `peers` are interpreters by name."""
    entries = [(OURS, weights, sys.executable)]
    entries += [(peer, form, python) for peer, python in peers.items() for form in FORMS[weights].get(peer, [])]
    check_memory(shape, len(entries), weights)
    checkpoint = write_shape(shape)
    starts = [
        partial(Contestant, peer, checkpoint, FOLDER / f"{peer}-{form}.log", python, form=form)
        for peer, form, python in entries
    ]
    began = time.perf_counter()
    with start_all(starts) as contestants:
        limits = roofline(shape)
        neighbours = Neighbours([each.process.pid for each in contestants])
        left = seconds - (time.perf_counter() - began)
        runs: dict[str, Run] = {each.name: each for each in contestants}
        runs |= {"Attend sampled": partial(contestants[0], do_sample=True)} if options.sampled else {}
        comparisons = compare(runs, options.pairs, neighbours, left)
        facts = {"contestants": [each.facts for each in contestants], "cores_of_others": neighbours.laps}
    print(f"{shape} {weights}: {neighbours.sentence()}", file=sys.stderr)
    return Outcome(shape, weights, comparisons, limits, facts)


def split_words(text: str) -> list[str]:
    """The words between commas."""
    return text.split(",")


def interpreter(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, _, path = text.partition("=")
    if name not in PACKAGES or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with a name of {', '.join(PACKAGES)}")
    return name, path


def read_flags(words: list[str] | None) -> argparse.Namespace:
    """The command line, with `peers`: interpreters by name."""
    parser = options_of(__doc__)
    parser.add_argument("--shape", type=split_words, default=["S", "M"], help=f"of {', '.join(SHAPES)}; default S,M")
    parser.add_argument(
        "--peer", type=split_words, help=f"of {', '.join(PACKAGES)}; default: all installed, or none with --sampled"
    )
    parser.add_argument(
        "--python", type=interpreter, action="append", default=[], metavar="NAME=PATH", help="a peer's interpreter"
    )
    parser.add_argument("--weights", type=split_words, default=["bf16"], help=f"of {', '.join(FORMS)}; default bf16")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="for everything; who is slow then has fewer turns, one of each at least"
    )
    parser.add_argument("--sampled", action="store_true", help="Attend beside itself with temperature 0.7, top_p 0.95")
    parser.add_argument("--pairs", type=int, default=9, help="turns of each contestant (default 9)")
    options = parser.parse_args(words)
    known: dict[str, Collection[str]] = {"shape": SHAPES, "peer": PACKAGES, "weights": FORMS}
    if wrong := [word for name, words in known.items() for word in getattr(options, name) or () if word not in words]:
        parser.error(f"there is no {wrong[0]!r}")
    pythons = dict.fromkeys(PACKAGES, sys.executable) | dict(options.python)
    found = [peer for peer in options.peer or (() if options.sampled else PACKAGES) if is_installed(peer, pythons[peer])]
    if missing := set(options.peer or ()) - set(found):
        parser.error(f"{missing.pop()} is not installed; --python names another interpreter")
    options.peers = {peer: pythons[peer] for peer in found}
    return options


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    options = read_flags(words)
    end = time.perf_counter() + 60 * options.minutes
    report = Report(options.json, HEAD, bench="engine")
    facts: dict[str, Any] = {}
    pairs = [(shape, weights) for shape in options.shape for weights in options.weights]
    try:
        for left, (shape, weights) in zip(range(len(pairs), 0, -1), pairs, strict=True):
            share = (end - time.perf_counter()) / left
            outcome = bench_shape(shape, weights, options.peers, options, share)
            facts[f"{shape} {weights}"] = outcome.facts | {"roofline": outcome.limits}
            report.add(outcome.figures(), outcome.rows(), facts=facts)
    except PeerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
