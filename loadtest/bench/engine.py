"""Throughput of the engine beside its peers, in-process, on the same random weights: attend bench engine --shape S

W1: one request, 128 -> 128 tokens, decode tokens/s. W2: 16 at once, output tokens/s. W3: a prompt of 1024 tokens, prompt
tokens/s. Greedy, end-of-text ignored. Each contestant is a process of its own, which stands still while others have their
turn. A ratio is the median of the quotients of neighbours. With --weights int8,int4 each side keeps the weights in its own form
of so many bits. With --sampled Attend stands beside itself, sampling with temperature 0.7 and top_p 0.95.

A peer that is installed in another environment: --python openvino=/path/to/venv/bin/python
"""

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from attend.model.shapes import SHAPES
from loadtest.bench.contestant import FORMS, OURS, PACKAGES, Contestant, PeerError, is_installed, start_all
from loadtest.bench.figures import Comparison, Report, options_of, take_turns
from loadtest.bench.machine import Neighbours
from loadtest.bench.shapes import AT_ONCE, FOLDER, LONG, OUTPUT, PROMPT, write_shape

Run = Callable[..., float]
"""(requests, prompt tokens, output tokens) -> seconds."""
Work = Callable[[Run], float]
"""A work's tokens/s."""
HEAD = ("shape", "weights", "work", "Attend tok/s", "peers: tok/s, Attend's ratio")


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
) -> Iterator[Comparison]:
    """Each work in turns as it is measured, all within so many seconds; the first turns of each warm up."""
    end = time.perf_counter() + seconds
    for left, (name, work) in zip(range(len(works), 0, -1), works.items(), strict=True):
        turns = {each: partial(turn, work, contestant, neighbours) for each, contestant in contestants.items()}
        share = (end - time.perf_counter()) / left
        shown = partial("{} {:.4g} tokens/s".format, name)
        yield Comparison(name, "tokens/s", asyncio.run(take_turns(turns, pairs, warm_up, share, show=shown)))


def bench_shape(shape: str, weights: str, options: argparse.Namespace, report: Report, seconds: float = math.inf) -> None:
    """Every work of one shape and form of weights, each reported when it is measured, within so many seconds."""
    entries = [(OURS, weights, sys.executable)]
    entries += [(peer, form, python) for peer, python in options.peers.items() for form in FORMS[weights].get(peer, [])]
    checkpoint = write_shape(shape)
    starts = [
        partial(Contestant, peer, checkpoint, FOLDER / f"{peer}-{form}.log", python, form=form)
        for peer, form, python in entries
    ]
    began = time.perf_counter()
    with start_all(starts) as contestants:
        neighbours = Neighbours([each.process.pid for each in contestants])
        runs: dict[str, Run] = {each.name: each for each in contestants}
        runs |= {"Attend sampled": partial(contestants[0], do_sample=True)} if options.sampled else {}
        facts = [each.facts for each in contestants]
        for found in compare(runs, options.pairs, neighbours, seconds - (time.perf_counter() - began)):
            named = Comparison(f"{shape} {weights} {found.what}", found.unit, found.values)
            report.add(named.figures(), [row(shape, weights, found)], **{f"contestants of {shape} {weights}": facts})
    print(f"{shape} {weights}: {neighbours.sentence()}", file=sys.stderr)


def row(shape: str, weights: str, comparison: Comparison) -> list[str]:
    """Cells under HEAD."""
    medians = {name: f"{comparison.figure(name).median:.0f}" for name in comparison.values}
    others = "; ".join(f"{name}: {medians[name]}, {comparison.ratio(name).short()}" for name in comparison.others())
    return [shape, weights, comparison.what, next(iter(medians.values())), others]


def interpreter(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, _, path = text.partition("=")
    if name not in PACKAGES or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with a name of {', '.join(PACKAGES)}")
    return name, path


def read_flags(words: list[str] | None) -> argparse.Namespace:
    """The command line, with `peers`: interpreters by name."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--shape", type=lambda text: text.split(","), default=["S", "M"], help=f"of {', '.join(SHAPES)}; default S,M"
    )
    about = f"of {', '.join(PACKAGES)}; default: all installed, or none with --sampled"
    parser.add_argument("--peer", type=lambda text: text.split(","), help=about)
    parser.add_argument(
        "--python", type=interpreter, action="append", default=[], metavar="NAME=PATH", help="a peer's interpreter"
    )
    parser.add_argument(
        "--weights", type=lambda text: text.split(","), default=["bf16"], help=f"of {', '.join(FORMS)}; default bf16"
    )
    about = "for everything; who is slow then has fewer turns, one of each at least"
    parser.add_argument("--minutes", type=float, default=math.inf, help=about)
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
    pairs = [(shape, weights) for shape in options.shape for weights in options.weights]
    try:
        for left, (shape, weights) in zip(range(len(pairs), 0, -1), pairs, strict=True):
            bench_shape(shape, weights, options, report, (end - time.perf_counter()) / left)
    except PeerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
