"""Performance regressions, this tree beside its base: attend bench gate [--base REVISION]; `make bench-gate`

Both engines run in one go on shape M, in turns, each with the code of its own tree, in bfloat16 and int8, and start anew once;
the base is a git worktree that goes again. Ends with 1 where the 95 % interval of a ratio lies wholly below 0.97, for W1, W2 or
W3 (see `attend bench engine`), or for W2 drawn with temperature 0.7 and top_p 0.95. Some five minutes, on a quiet machine.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from loadtest.bench.contestant import OURS, TREE, Contestant, PeerError, start_all
from loadtest.bench.engine import WORKS, Work, compare, w2, w3
from loadtest.bench.figures import Comparison, Report, interval, options_of
from loadtest.bench.machine import Neighbours
from loadtest.bench.shapes import FOLDER, PROMPT, write_shape

LEAST, PAIRS = 0.97, 6
"""The limit, and the fewest turns that can show a loss."""
STARTS = 2
"""Processes of each tree, one after the other: of the same code, one may be 5 % faster than the next."""
FORMS = ("bf16", "int8")
SAMPLED = "W2 sampled"
CELLS: dict[str, Work] = {**WORKS, "W3": partial(w3, runs=1), SAMPLED: lambda run: w2(partial(run, do_sample=True))}
"""What is compared for each form of the weights."""
NATIVE = Path("attend/model/net/native")


def slower(ratios: Sequence[float]) -> bool:
    """True if ratios of tokens/s, this tree over its base, show a loss: their interval lies wholly below LEAST."""
    assert len(ratios) >= PAIRS, "too few for an interval of 95 %"
    return interval(ratios)[1] < LEAST


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """The tree of a revision with its kernels built, for as long as the block lasts. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        tree, git = Path(folder) / "base", ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            for library in (TREE / NATIVE).glob("decoder-*.so"):  # of the same source it need not be built again
                shutil.copy(library, tree / NATIVE)
            build(tree)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def build(tree: Path) -> None:
    """The tree's native kernels, where there is a compiler and they are not built."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    code = "from attend.model.net.native import __main__, library; library.library_path().is_file() or __main__.main()"
    subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, check=True, stdout=sys.stderr)


THIS = "this tree"


def judge(comparison: Comparison, base: str) -> tuple[str, ...]:
    """A row; its last cell is `slower` or `kept`."""
    return (comparison.what, *comparison.cells(), "slower" if slower(comparison.ratio(base).values) else "kept")


def run(options: argparse.Namespace) -> bool:
    """Both trees in turns; true if anything became slower. Raises CalledProcessError of git or the build, PeerError of a
    contestant.
    """
    checkpoint = write_shape("M")
    build(TREE)
    with worktree(options.base) as base:
        head = ("work", f"{THIS}, tok/s", f"{options.base}, tok/s", f"{THIS} / {options.base}", "verdict")
        report, verdicts = Report(options.json, head, bench="gate"), set[str]()
        laps: list[float] = []
        for form in FORMS:
            starts = [
                partial(Contestant, OURS, checkpoint, FOLDER / f"{name}.log", tree=tree, form=form)
                for name, tree in (("this", TREE), ("base", base))
            ]
            parts = []
            for _ in range(STARTS):
                with start_all(starts) as both:
                    neighbours = Neighbours([each.process.pid for each in both])
                    parts.append(compare_both(both, options, neighbours))
                    laps += neighbours.laps
            found = [join_comparisons(f"{form} ", each) for each in zip(*parts, strict=True)]
            rows = [judge(each, options.base) for each in found]
            report.add([figure for each in found for figure in each.figures()], rows, cores_of_others=laps)
            verdicts |= {row[-1] for row in rows}
        neighbours.laps = laps
        print(neighbours.sentence(), file=sys.stderr)
        return "slower" in verdicts


def compare_both(both: Sequence[Contestant], options: argparse.Namespace, neighbours: Neighbours) -> list[Comparison]:
    """Every cell, after a short work of each that warms up."""
    for each in both:
        each(1, PROMPT, 2)
    neighbours.lap()
    neighbours.laps.clear()
    runs = dict(zip((THIS, options.base), both, strict=True))
    return list(compare(runs, -(-options.pairs // STARTS), neighbours, works=CELLS, warm_up=0))


def join_comparisons(form: str, parts: Sequence[Comparison]) -> Comparison:
    """The turns of all parts as one comparison, named after the form."""
    values = {name: [value for part in parts for value in part.values[name]] for name in parts[0].values}
    return Comparison(form + parts[0].what, parts[0].unit, values)


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, write JSON, judge."""
    parser = options_of(__doc__)
    parser.add_argument("--base", default="HEAD~1", help="revision to compare with (default HEAD~1)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"turns of each (default {PAIRS})")
    options = parser.parse_args(words)
    if options.pairs < PAIRS:
        parser.error(f"--pairs must be at least {PAIRS}; got {options.pairs}")
    try:
        sys.exit(int(run(options)))
    except (subprocess.CalledProcessError, PeerError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
