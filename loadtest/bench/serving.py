"""What the service adds to the engine: OMP_WAIT_POLICY=PASSIVE attend bench serving [what ...]

parse: reading a request. per-token: CPU time of a token without the model. mask: structured output against none. All in one
process without Ray, with the threads and the waiting policy that `attend serve` sets. over-http, only where it is named: a
server of its own beside the same engine in this process, with the default model or a --shape.
"""

import argparse
import tempfile
from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.shapes import SHAPES
from loadtest.bench import mask, over_http, parsing, per_token
from loadtest.bench.figures import Figure, Report, options_of
from loadtest.bench.shapes import write_shape
from loadtest.options import add_seed

ALONE = ("parse", "per-token", "mask")
WHAT = (*ALONE, "over-http")


def measure(what: str, options: argparse.Namespace) -> list[Figure]:
    """The figures of one of WHAT."""
    turns, tokens = options.turns, options.tokens
    if what == "parse":
        return parsing.run(10 * turns)
    if what == "per-token":
        return per_token.run(turns, tokens)
    if what == "mask":
        return mask.run(turns, tokens, options.model)
    folder = write_shape(options.shape) if options.shape else DEFAULT_MODEL
    log = Path(tempfile.gettempdir()) / "attend-bench.log"
    return over_http.run(turns, tokens, folder, log, options.seed)


def read_flags(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; `words` instead of it."""
    parser = options_of(__doc__, turns=7)
    parser.add_argument("what", nargs="*", metavar="what", help=f"of {', '.join(WHAT)}; default: all but over-http")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each stream (default 256)")
    parser.add_argument("--shape", choices=list(SHAPES), help="what over-http serves; default: the default model")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="what mask serves; default: the default model")
    add_seed(parser)
    options = parser.parse_args(words)
    for what in options.what:
        if what not in WHAT:
            parser.error(f"what must be of {', '.join(WHAT)}; got {what!r}")
    if not 1 <= options.tokens <= 900:
        parser.error(f"tokens must be from 1 to 900, which the model's context holds; got {options.tokens}")
    if options.turns < 1:
        parser.error(f"turns must be at least 1; got {options.turns}")
    return options


def main(words: list[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    options = read_flags(words)
    report = Report(options.json, bench="serving", seed=options.seed)
    for what in options.what or ALONE:
        report.add(measure(what, options))


if __name__ == "__main__":
    main()
