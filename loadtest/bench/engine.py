"""Throughput of the engine beside its peers, in-process, on the same random weights: attend bench engine --shape S

W1: one request, 128 -> 128 tokens, decode tokens/s. W2: 16 at once, output tokens/s. W3: a prompt of 1024 tokens, prompt
tokens/s. Greedy, end-of-text ignored. Each contestant is a process of its own, which stands still while others have their
turn. A ratio is the median of the quotients of neighbours. With --weights int8,int4 each side keeps the weights in its own form
of so many bits; with q8_0, q4_0 or q4_k_m Attend and llama.cpp read the same GGUF file. With --sampled Attend stands beside
itself, sampling with temperature 0.7 and top_p 0.95.

With --depth 0,4096 in place of W1 to W3, for each number of tokens that are in the cache already: a prompt of 128 behind them,
with what the depth before lacks of them, in prompt tokens/s; then streams with prompts of their own behind the same context,
as many at once as --at-once says (1,8), in decode tokens/s. Who keeps no context takes no part. Each row is printed and filed
when it is measured.

A peer that is installed in another environment: --python openvino=/path/to/venv/bin/python
"""

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from attend.model.shapes import SHAPES
from loadtest.bench.contestant import FORMS, KEEPS_CONTEXT, OURS, PACKAGES, Contestant, PeerError, is_installed, start_all
from loadtest.bench.figures import Comparison, Report, options_of, take_turns
from loadtest.bench.machine import Neighbours
from loadtest.bench.shapes import AT_ONCE, FILES, FOLDER, LONG, OUTPUT, PROMPT, shape, write_shape

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
BLOCK = 64
"""More tokens than a block of any cache has."""


def prompt_at(run: Run, depth: int, before: int) -> float:
    """Prompt tokens/s of a context that has been computed up to `before`, and of a prompt behind it."""
    return (depth - before + PROMPT) / run(1, PROMPT, 1, depth=depth)


def decode_at(run: Run, depth: int, rows: int) -> float:
    """Decode tokens/s of so many streams behind one context, all of whose prompts are in the cache."""
    run(rows, PROMPT, 1, depth=depth)
    first = run(rows, PROMPT, 1, depth=depth)
    return rows * (OUTPUT - 1) / (run(rows, PROMPT, OUTPUT, depth=depth) - first)


def plan(depths: Sequence[int], at_once: Sequence[int], pairs: int) -> list[tuple[dict[str, Work], int, int]]:
    """Works with the turns of each, and those to warm up: a context is computed once alone."""
    if not depths:
        return [(WORKS, pairs, 1)]
    found: list[tuple[dict[str, Work], int, int]] = []
    for before, depth in pairwise((0, *depths)):
        found.append(({f"prompt at {depth}": partial(prompt_at, depth=depth, before=before)}, 1, 0))
        found.append(({f"{rows} at once at {depth}": partial(decode_at, depth=depth, rows=rows) for rows in at_once}, pairs, 1))
    return found


async def turn(name: str, work: Work, run: Run, neighbours: Neighbours) -> float:
    """One measurement of a contestant. Raises PeerError with its name."""
    try:
        value = work(run)
    except PeerError as error:
        error.who = name
        raise
    neighbours.lap()
    return value


def compare(
    contestants: dict[str, Run],
    pairs: int,
    neighbours: Neighbours,
    seconds: float = math.inf,
    works: Mapping[str, Work] = WORKS,
    warm_up: int = 1,
) -> Iterator[Comparison]:
    """Each work in turns as it is measured, all within so many seconds; the first turns of each warm up.

    A peer that ends at a work is told of and left out from there on: `contestants` lose it. Raises PeerError where the first
    ends.
    """
    end = time.perf_counter() + seconds
    for left, (name, work) in zip(range(len(works), 0, -1), works.items(), strict=True):
        shown, values = partial("{} {:.4g} tokens/s".format, name), None
        while values is None:
            turns = {each: partial(turn, each, work, contestant, neighbours) for each, contestant in contestants.items()}
            share = (end - time.perf_counter()) / left
            try:
                values = asyncio.run(take_turns(turns, pairs, warm_up, share, show=shown))
            except PeerError as error:
                if error.who is None or error.who == next(iter(contestants)):
                    raise
                del contestants[error.who]
                print(f"{error.who} is left out from {name} on: {error}", file=sys.stderr, flush=True)
        yield Comparison(name, "tokens/s", values)


def starts_of(
    shape: str, weights: str, peers: Mapping[str, str], depths: Sequence[int], at_once: Sequence[int]
) -> list[Callable[[], Contestant]]:
    """What starts Attend, and each form of each peer that can take part, on the weights in that form."""
    room = max(depths) + max(at_once) * (PROMPT + OUTPUT + BLOCK) if depths else 0
    entries = [(OURS, weights, sys.executable)]
    for peer, python in peers.items():
        forms = FORMS[weights].get(peer, [])
        why = "" if forms else f"it has no weights in {weights}"
        if depths and peer not in KEEPS_CONTEXT:
            why = "it keeps no context between two calls"
        if why:
            print(f"{peer} is left out: {why}", file=sys.stderr, flush=True)
        else:
            entries += [(peer, form, python) for form in forms]
    starts: list[Callable[[], Contestant]] = []
    for peer, form, python in entries:
        checkpoint = write_shape(shape, form.lower() if form.lower() in FILES else "bf16")
        log = FOLDER / f"{peer}-{form}.log"
        starts.append(partial(Contestant, peer, checkpoint, log, python, form=form, context=room))
    return starts


def bench_shape(shape: str, weights: str, options: argparse.Namespace, report: Report, seconds: float = math.inf) -> None:
    """Every work of one shape and form of weights, each reported when it is measured, within so many seconds."""
    began, positions = time.perf_counter(), SHAPES[shape]["max_position_embeddings"]
    depths = [depth for depth in options.depth if depth + PROMPT + OUTPUT <= positions]
    for depth in set(options.depth) - set(depths):
        print(f"{depth} is left out: {shape} has {positions} positions", file=sys.stderr, flush=True)
    if options.depth and not depths:
        return
    with start_all(starts_of(shape, weights, options.peers, depths, options.at_once), all_must=False) as contestants:
        neighbours = Neighbours([each.process.pid for each in contestants])
        runs: dict[str, Run] = {each.name: each for each in contestants}
        runs |= {"Attend sampled": partial(contestants[0], do_sample=True)} if options.sampled else {}
        facts = [each.facts for each in contestants]
        works = plan(depths, options.at_once, options.pairs)
        if depths:
            for run in list(runs.values()):
                run(1, BLOCK, 2)  # whatever is made at a first call is no part of a prompt's time
        for left, (some, turns, warm_up) in zip(range(len(works), 0, -1), works, strict=True):
            share = (seconds - (time.perf_counter() - began)) / left
            for found in compare(runs, turns, neighbours, share, some, warm_up):
                named = Comparison(f"{shape} {weights} {found.what}", found.unit, found.values)
                report.add(named.figures(), [row(shape, weights, found)], **{f"contestants of {shape} {weights}": facts})
    print(f"{shape} {weights}: {neighbours.sentence()}", file=sys.stderr)


def row(shape: str, weights: str, comparison: Comparison) -> list[str]:
    """Cells under HEAD."""
    medians = {name: f"{comparison.figure(name).median:.0f}" for name in comparison.values}
    others = "; ".join(f"{name}: {medians[name]}, {comparison.ratio(name).short()}" for name in comparison.others())
    return [shape, weights, comparison.what, next(iter(medians.values())), others]


def read_numbers(text: str) -> list[int]:
    """Numbers, the smallest first: a context goes on where the one before ends."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them")
    return sorted({int(word) for word in text.split(",")})


def interpreter(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, _, path = text.partition("=")
    if name not in PACKAGES or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with a name of {', '.join(PACKAGES)}")
    return name, path


def read_flags(words: list[str] | None) -> argparse.Namespace:
    """The command line, with `peers`: interpreters by name."""
    parser = options_of(__doc__)
    about = f"of {', '.join(SHAPES)}; default S,M"
    parser.add_argument("--shape", type=lambda text: [*map(shape, text.split(","))], default=["S", "M"], help=about)
    about = "tokens that are in the cache already, for example 0,4096,8192,16384; in place of W1 to W3"
    parser.add_argument("--depth", type=read_numbers, default=[], help=about)
    parser.add_argument("--at-once", type=read_numbers, help="streams behind a --depth; default 1,8")
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
    known: dict[str, Collection[str]] = {"peer": PACKAGES, "weights": FORMS}
    if wrong := [word for name, words in known.items() for word in getattr(options, name) or () if word not in words]:
        parser.error(f"there is no {wrong[0]!r}")
    if options.at_once and (not options.depth or 0 in options.at_once):
        parser.error("--at-once goes with --depth, and takes numbers from 1")
    options.at_once = options.at_once or [1, 8]
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
