"""`attend keys`: give, change, list and take away API keys."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attend.model.errors import SettingError
from attend.model.params import MAX_PRIORITY
from attend.service.access.keys import (
    FIELDS,
    MAX_LIMIT,
    MAX_WEIGHT,
    MIN_WEIGHT,
    digest_of,
    editing,
    entry_of,
    fields_of,
    load_keys,
    new_secret,
    read_name,
)
from attend.service.commands.flags import PlainCommand, PlainGroup, with_options

app = typer.Typer(
    cls=PlainGroup,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
NO_LIMIT = "none"
"""The value of a flag that takes a limit away."""

NameArgument = Annotated[
    str, typer.Argument(help="Name of the key: 1 to 64 letters, digits and . _ -", metavar="NAME", show_default=False)
]
FileOption = Annotated[
    str, typer.Option("--file", help="The file of hashes that the server reads.", envvar="ATTEND_API_KEYS_FILE", metavar="PATH")
]
OPTIONS = {
    "requests_per_minute": (f"Rate limit of requests, 1 to {MAX_LIMIT}, on each replica; default: no limit.", "N"),
    "tokens_per_minute": ("Rate limit of prompt and answer tokens, on each replica; default: no limit.", "N"),
    "concurrent": ("Limit of concurrent answers, on each replica; default: no limit.", "N"),
    "max_priority": (f"Highest priority of its calls, 0 to {MAX_PRIORITY}; default: no limit.", "N"),
    "weight": (f"Its share of the engine beside other keys, {MIN_WEIGHT} to {MAX_WEIGHT}; default: 1.", "X"),
    "share_prefixes": ("Group of keys that share cached prefixes; default: the key shares with none.", "GROUP"),
}
"""What is said of each of FIELDS, and what its value is called."""


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


# A value is text: what reads the file complains of it in the same words.
WITH_FIELDS = with_options(
    {
        field: Annotated[str | None, typer.Option(_flag(field), help=about, metavar=kind)]
        for field, (about, kind) in OPTIONS.items()
    }
)


@app.callback()
def keys(context: typer.Context) -> None:
    """Give, change, list and take away API keys. A running server follows within a second or two."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("add", cls=PlainCommand)
@WITH_FIELDS
def add(name: NameArgument, file: FileOption = "", *, options: dict[str, Any]) -> None:
    """Make a key and print it, this once: only its hash is kept. Makes the file where there is none."""
    path, fields = _path(file), _given_options(options)
    name, secret = read_name(name), new_secret()
    with editing(path) as entries:
        if name in entries:
            raise SettingError(f"there is a key {name!r} in {str(path)!r} already; remove it first, or choose another name")
        entries[name] = entry_of(digest_of(secret.encode()), _stored_fields(fields))
    print(f"The API key of {name!r}, shown this once; {path} keeps its hash only:", file=sys.stderr)
    print(secret)


@app.command("set", cls=PlainCommand)
@WITH_FIELDS
def change(name: NameArgument, file: FileOption = "", *, options: dict[str, Any]) -> None:
    """Change what is said of a key. What is not given stays; `none` takes it away."""
    path, fields = _path(file), _given_options(options)
    if not fields:
        raise SettingError(f"say what to change: {', '.join(map(_flag, FIELDS))}")
    with editing(path) as entries:
        if name not in entries:
            raise SettingError(_unknown(name, path))
        entries[name] = entry_of(entries[name].digest, _stored_fields(fields_of(entries[name]) | fields))


@app.command("list", cls=PlainCommand)
def list_keys(file: FileOption = "") -> None:
    """Names, limits and shares, a line each; `-` is none."""
    rows = [("NAME", *(name.upper() for name in FIELDS))]
    for name, entry in load_keys(_path(file)).items():
        rows.append((name, *map(_field_text, fields_of(entry).values())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command(cls=PlainCommand)
def remove(name: NameArgument, file: FileOption = "") -> None:
    """Take a key away. Calls that run with it are finished."""
    path = _path(file)
    with editing(path) as entries:
        if entries.pop(name, None) is None:
            raise SettingError(_unknown(name, path))
    print(f"The API key of {name!r} is gone from {path}.", file=sys.stderr)


def _path(file: str) -> Path:
    if not file:
        raise SettingError("say which file holds the API keys: --file PATH, or ATTEND_API_KEYS_FILE")
    return Path(file)


def _unknown(name: str, path: Path) -> str:
    return f"there is no key {name[:64]!r} in {str(path)!r}"


def _given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of FIELDS that were given; None where one takes something away. Raises SettingError naming the flag."""
    given: dict[str, Any] = {}
    for field, read in FIELDS.items():
        if text := options[field]:
            given[field] = None if text == NO_LIMIT else read(_flag(field), _value(field, text))
    return given


def _stored_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if value is not None}


def _value(field: str, text: str) -> object:
    """A number where the text is one; int() and float() take more, such as 1_000 and nan, and int() refuses very long ones."""
    if field == "share_prefixes" or not text.isascii() or len(text) >= 20:
        return text
    if text.isdecimal():
        return int(text)
    return float(text) if text.replace(".", "", 1).isdecimal() else text


def _field_text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
