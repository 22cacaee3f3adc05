"""`attend keys`: give, list and take away API keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from attend.model.errors import SettingError
from attend.service.access.keys import MAX_LIMIT, Entry, digest_of, editing, load_keys, new_secret, read_limit, read_name
from attend.service.access.quota import LIMITS, Limits

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

NameArgument = Annotated[str, typer.Argument(help="Name of the key: 1 to 64 letters, digits and . _ -", show_default=False)]
FileOption = Annotated[
    str, typer.Option("--file", help="The file of hashes that the server reads.", envvar="ATTEND_API_KEYS_FILE", metavar="PATH")
]
# Limits are text: `read_limit` complains of them in the same words as it does of the file.
RequestsOption = Annotated[
    str,
    typer.Option(
        "--requests-per-minute",
        help=f"Rate limit of requests, 1 to {MAX_LIMIT}, on each replica; default: no limit.",
        metavar="N",
    ),
]
TokensOption = Annotated[
    str,
    typer.Option(
        "--tokens-per-minute", help="Rate limit of prompt and answer tokens, on each replica; default: no limit.", metavar="N"
    ),
]
ConcurrentOption = Annotated[
    str, typer.Option("--concurrent", help="Limit of concurrent answers, on each replica; default: no limit.", metavar="N")
]


@app.callback()
def keys(context: typer.Context) -> None:
    """Give, list and take away API keys. A running server follows within a second or two."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def add(
    name: NameArgument,
    file: FileOption = "",
    requests_per_minute: RequestsOption = "",
    tokens_per_minute: TokensOption = "",
    concurrent: ConcurrentOption = "",
) -> None:
    """Make a key and print it, this once: only its hash is kept. Makes the file where there is none."""
    path, name = _path(file), read_name(name)
    limits = Limits(
        _limit("--requests-per-minute", requests_per_minute),
        _limit("--tokens-per-minute", tokens_per_minute),
        _limit("--concurrent", concurrent),
    )
    secret = new_secret()
    with editing(path) as entries:
        if name in entries:
            raise SettingError(f"there is a key {name!r} in {str(path)!r} already; remove it first, or choose another name")
        entries[name] = Entry(digest_of(secret.encode()), limits)
    print(f"The API key of {name!r}, shown this once; {path} keeps its hash only:", file=sys.stderr)
    print(secret)


@app.command("list")
def list_keys(file: FileOption = "") -> None:
    """Names and limits, a line each; `-` is no limit."""
    rows = [("NAME", *(limit.upper() for limit in LIMITS))]
    for name, entry in load_keys(_path(file)).items():
        rows.append((name, *(str(getattr(entry.limits, limit) or "-") for limit in LIMITS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command()
def remove(name: NameArgument, file: FileOption = "") -> None:
    """Take a key away. Calls that run with it are finished."""
    path = _path(file)
    with editing(path) as entries:
        if entries.pop(name, None) is None:
            raise SettingError(f"there is no key {name[:64]!r} in {str(path)!r}")
    print(f"The API key of {name!r} is gone from {path}.", file=sys.stderr)


def _path(file: str) -> Path:
    if not file:
        raise SettingError("say which file holds the API keys: --file PATH, or ATTEND_API_KEYS_FILE")
    return Path(file)


def _limit(flag: str, text: str) -> int | None:
    if not text:
        return None
    # int() takes more than digits, such as 1_000, and refuses very long ones.
    return read_limit(flag, int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text)
