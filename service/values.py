"""Parsing of settings' values: sizes, hub references, lists of networks and hosts."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from attend.service.access.caller import HEADER, SECRET, networks
from attend.service.access.hosts import hosts

HUB = "hf://"
REFERENCE = re.compile(
    r"hf://(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(/(?P<file>\w[\w.-]*\.gguf))?(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?",
    re.ASCII,
)
"""A repository of the Hugging Face hub, a GGUF file in it, and a branch, tag or commit of it."""
ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#,]+")
"""What a browser writes into the header Origin, or any."""
SIZE = re.compile(r"(\d+|\d+\.\d+(?= ?[KMGT])) ?(?:([KMGT])(I?))?B?", re.ASCII)


def to_integer(value: Any) -> Any:
    """A variable is text; a Literal of numbers takes none."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def parse_pairs(text: str) -> list[tuple[str, str]]:
    """NAME=FOLDER,NAME=FOLDER in parts."""
    return [(name.strip(), folder.strip()) for name, _, folder in (part.partition("=") for part in text.split(",") if part)]


def size_in_bytes(value: Any) -> Any:
    """A size with its unit, 2GB or 512MiB, in bytes. K, M, G and T are powers of 1000, with an i of 1024."""
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value.strip().upper())
    number, unit, binary = match.groups() if match else ("0", None, None)
    size = int(Decimal(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))
    if not size:
        raise PydanticCustomError("size", "it must be a number of bytes, as 536870912, 512MiB or 2GB")
    return size


def _readable(read: Callable[[str], object]) -> AfterValidator:
    """Text that `read` takes; its ValueError is the sentence."""

    def check(value: str) -> str:
        try:
            read(value)
        except ValueError as error:
            raise PydanticCustomError("text", "{sentence}", {"sentence": str(error)}) from error
        return value

    return AfterValidator(check)


def _header(name: str) -> None:
    if not HEADER.fullmatch(name) or name.lower() in SECRET:
        raise ValueError(
            "it must be the name of a header, which is logged: letters, digits, - and _, and none that holds secrets"
        )


def origins(text: str) -> tuple[str, ...]:
    """The origins of `cors_origins`, comma-separated; `*` is any. Raises ValueError that says what is none."""
    found = tuple(origin for part in text.split(",") if (origin := part.strip()))
    for origin in found:
        if not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin[:64]!r} is no origin: it must be as https://host or http://localhost:3000, without a path"
            )
    return found


Networks, Header, Hosts, Origins = _readable(networks), _readable(_header), _readable(hosts), _readable(origins)
"""For `Annotated`: settings that stay text, and are checked at the start."""
