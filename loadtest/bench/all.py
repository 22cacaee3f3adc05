"""Every number of a page again: attend bench all --write loadtest/results/engine.md

A page says itself which benchmarks it shows: `<!-- bench:engine --shape S -->` begins the table of `attend bench engine --shape
S`, and `<!-- /bench -->` ends it. Each is run, its figures go to a JSON file in --out, and its table to its place in the page.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.bench.contestant import TREE

BLOCK = re.compile(r"(?P<begin><!-- bench:(?P<words>[^>]*?) -->\n).*?(?P<end><!-- /bench -->)", re.DOTALL)
OUT = TREE / "loadtest" / "out" / "bench"


def rewrite(page: str, measure: Callable[[list[str]], str], only: Sequence[str] = ()) -> str:
    """The page with what `measure` gives for the words of each marker; of benchmarks in `only` alone, where it names any."""

    def fresh(block: re.Match[str]) -> str:
        words = shlex.split(block["words"])
        kept = bool(only) and words[0] not in only
        return block[0] if kept else f"{block['begin']}\n{measure(words).strip()}\n\n{block['end']}"

    return BLOCK.sub(fresh, page)


def run(words: Sequence[str], pythons: Sequence[str], out: Path) -> str:
    """The table of one benchmark. Raises CalledProcessError."""
    path = out / f"{re.sub('[^A-Za-z0-9]+', '-', ' '.join(words))}.json"
    more = [flag for python in pythons for flag in ("--python", python)] if words[0] == "engine" else []
    print(f"attend bench {shlex.join(words)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"loadtest.bench.{words[0]}", *words[1:], *more, "--json", path]
    subprocess.run(command, cwd=TREE, check=True, stdout=sys.stderr)
    return json.loads(path.read_text(encoding="utf-8"))["table"]


def main(arguments: list[str] | None = None) -> None:
    """Run what the page shows, one after the other, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, metavar="PAGE", help="page whose tables are made again")
    parser.add_argument("--only", action="append", default=[], metavar="WHAT", help="no other benchmark than these")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="a peer's interpreter, for engine")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files (default loadtest/out/bench)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.write.read_text(encoding="utf-8")
    try:
        page = rewrite(page, lambda words: run(words, options.python, options.out.resolve()), options.only)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{shlex.join(map(str, error.cmd))} ended with {error.returncode}; {options.write} stays as it was")
    options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
