"""Is this tree slower than its base? attend bench gate [--base REVISION]; `make bench-gate`

Both engines run in one go on shape S, in turns, each with the code of its own tree, and start anew twice; the base is a git
worktree that goes again. Ends with 1 where the 95 % interval of a ratio lies wholly below 0.97, for W1, W2 or W3 (see
`attend bench engine`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from loadtest.bench.contestant import OURS, TREE, Contestant, PeerError, together
from loadtest.bench.engine import compare
from loadtest.bench.figures import Comparison, file, interval, table
from loadtest.bench.machine import Neighbours
from loadtest.bench.shapes import FOLDER, write_shape

LEAST, PAIRS = 0.97, 6
"""The limit, and the fewest turns that can show a loss."""
STARTS = 3
"""Processes of each tree, one after the other: of the same code, one may be 5 % faster than the next."""


def slower(ratios: Sequence[float]) -> bool:
    """Whether ratios of tokens/s, this tree over its base, show a loss: their interval lies wholly below LEAST."""
    assert len(ratios) >= PAIRS, "too few for an interval of 95 %"
    return interval(ratios)[1] < LEAST


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """The tree of a revision with its kernels built, for as long as the block lasts. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        tree, git = Path(folder) / "base", ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            build(tree)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def build(tree: Path) -> None:
    """The tree's native kernels, where there is a compiler."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    package = "attend.model" if (tree / "attend").is_dir() else "model"  # an older base would import this tree's `attend`
    subprocess.run([sys.executable, "-m", f"{package}.net.native"], cwd=tree, env=environment, check=True, stdout=sys.stderr)


def judge(comparisons: Sequence[Comparison], base: str) -> tuple[str, bool]:
    """The table, and whether anything became slower."""
    names = list(comparisons[0].values)
    rows, bad = [], False
    for each in comparisons:
        ratio = each.ratio(base)
        verdict = "slower" if slower(ratio.values) else "kept"
        bad |= verdict == "slower"
        rows.append((each.what, *each.cells(), verdict))
    return table(("work", *(f"{name}, tok/s" for name in names), f"{names[0]} / {base}", "verdict"), rows), bad


def run(options: argparse.Namespace) -> tuple[list[Comparison], Neighbours]:
    """Both trees in turns. Raises CalledProcessError of git or the build, PeerError of a contestant."""
    checkpoint = write_shape(options.shape, options.folder)
    with worktree(options.base) as base:
        build(TREE)
        starts = [
            partial(Contestant, OURS, checkpoint, options.folder / f"{name}.log", tree=tree)
            for name, tree in (("this", TREE), ("base", base))
        ]
        found, laps = [], []
        for _ in range(STARTS):
            with together(starts) as (this, other):
                neighbours = Neighbours([this.process.pid, other.process.pid])
                found.append(compare({"this tree": this, options.base: other}, -(-options.pairs // STARTS), neighbours))
                laps += neighbours.laps
        neighbours.laps = laps
        return [joined(parts) for parts in zip(*found, strict=True)], neighbours


def joined(parts: Sequence[Comparison]) -> Comparison:
    """The turns of all parts as one comparison."""
    values = {name: [value for part in parts for value in part.values[name]] for name in parts[0].values}
    return Comparison(parts[0].what, parts[0].unit, values)


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, write JSON, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD~1", help="revision to compare with (default HEAD~1)")
    parser.add_argument("--shape", default="S", help="S (default), M or 1B")
    parser.add_argument("--pairs", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the checkpoint and the logs")
    parser.add_argument("--json", type=Path, help="write the figures here too, with every value")
    options = parser.parse_args(words)
    if options.pairs < PAIRS:
        parser.error(f"--pairs must be at least {PAIRS}; got {options.pairs}")
    try:
        comparisons, neighbours = run(options)
    except (subprocess.CalledProcessError, PeerError) as error:
        sys.exit(str(error))
    shown, bad = judge(comparisons, options.base)
    figures = [figure for each in comparisons for figure in each.figures()]
    file(options.json, shown, figures, bench="gate", cores_of_others=neighbours.laps)
    print(neighbours.sentence(), file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
