"""The numbers of the serving path: OMP_WAIT_POLICY=PASSIVE python -m loadtest.bench.serving [what ...] [--json FILE]

parse: reading a request. busy: the engine's steps while the service tokenizes and compiles. per-token: processor time of
a token without the model. mask: structured output against none. All in one process without Ray, with the threads and the
waiting policy that `attend serve` sets; over-http needs a server of the default model that runs already (--http), so it
is measured only where it is named.
"""

import argparse
import json
from pathlib import Path

from loadtest.bench import busy, mask, over_http, parsing, per_token
from loadtest.bench.figures import HEADER, Figure

ALONE = ("parse", "busy", "per-token", "mask")
WHAT = (*ALONE, "over-http")


def measure(what: str, options: argparse.Namespace) -> list[Figure]:
    """The figures of one of WHAT."""
    turns, tokens = options.turns, options.tokens
    if what == "parse":
        return parsing.run(10 * turns)
    if what == "busy":
        return busy.run(turns, options.seconds)
    if what == "per-token":
        return per_token.run(turns, tokens)
    return mask.run(turns, tokens) if what == "mask" else over_http.run(turns, tokens, options.http)


def read_flags(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; `words` instead of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="what", help=f"of {', '.join(WHAT)}; default: all but over-http")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each quantity (default 7)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each stream (default 256)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a phase of busy (default 8)")
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="server of over-http")
    parser.add_argument("--profile", action="store_true", help="also print where per-token's time goes")
    parser.add_argument("--json", type=Path, help="write the figures here too, with every value")
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
    documents = []
    print(HEADER)
    for what in options.what or ALONE:
        for figure in measure(what, options):
            print(figure.row(), flush=True)
            documents.append({"of": what} | figure.document())
    if options.profile:
        per_token.profile(options.tokens)
    if options.json is not None:
        options.json.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
