"""Headers of functions in the held-out files, and whether what a model writes below them is Python."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from attend.model.train import corpus

NUM_HEADERS = 100
MAX_TOKENS = 256
"""A completion that is longer, without a dedent, counts as failed."""

_HEADER = re.compile(r"^(?:async )?def .*:$", re.MULTILINE)
_DEDENT = re.compile(r"\n(?=\S)")


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a function, without its line end."""

    path: str
    """Path of its file, relative to the root of the corpus."""
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one completion ended, and whether it is Python."""

    is_complete: bool
    """The completion came back to the header's indentation, or reached the end of the text."""
    parses: bool
    """The completion has ended, and the header with what stands before that end is Python."""


def choose_headers(root: Path, count: int = NUM_HEADERS) -> list[Header]:
    """The first function of each held-out file in the order of their paths, then the second of each, until there are `count`.

    A function counts if its header is one line that starts in column 0 with `def` or `async def` and ends with a
    colon, if `pass` as its body makes it Python, and if no header before it is the same.
    """
    files = [[Header(path, line) for line in headers_of(text)] for path, text in corpus.texts(root, held_out=True)]
    chosen: dict[str, Header] = {}
    for header in (header for round_ in zip_longest(*files) for header in round_ if header is not None):
        if len(chosen) < count:
            chosen.setdefault(header.text, header)
    return list(chosen.values())


def headers_of(text: str) -> list[str]:
    """The one-line headers in column 0 of a text, in order."""
    return [line for line in _HEADER.findall(text) if is_python(f"{line} pass")]


def first_block(completion: str) -> str | None:
    """A completion up to the first line that is not blank and stands in column 0; None if there is none.

    The rule knows no syntax: such a line ends the body even inside a string or between brackets.
    """
    dedent = _DEDENT.search(completion)
    return completion[: dedent.start() + 1] if dedent else None


def judge(header: str, completion: str, *, is_complete: bool) -> Verdict:
    """Whether a completion ended and is Python; `is_complete` tells that the model itself ended the text."""
    body = first_block(completion)
    ended = is_complete or body is not None
    return Verdict(ended, ended and is_python(header + (completion if body is None else body)))


def is_python(text: str) -> bool:
    """Whether Python's own parser takes a text."""
    return corpus.parse_python(text) is not None


def count_verdicts(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """How many of the completions ended, and how many parse."""
    return sum(verdict.is_complete for verdict in verdicts), sum(verdict.parses for verdict in verdicts)
