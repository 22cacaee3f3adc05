"""Marks in a caller's texts, by which a prompt tells them from what the chat template wrote.

A template copies marks as it copies letters, and its usual methods of texts pass over them. They stand around the text of
each control token (`OPEN`, `CLOSE`), and at an end of a text that letters of the template could make one (`EDGE`).
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

OPEN, CLOSE, EDGE = MARKS = "\U000e01ed\U000e01ee\U000e01ef"
"""Variation selectors that no registered sequence has. Unlike noncharacters they stay as they are in `repr` of a text."""
_ANY = re.compile(f"[{MARKS}]")
_PIECES = re.compile(f"{OPEN}([^{MARKS}]+){CLOSE}|[{MARKS}]")
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\udb40\\udd(ed|ee|ef)")
_WHITE = "".join(filter(str.isspace, map(chr, range(0x3001))))

Span = tuple[int, int]
"""First character, and the one after the last. An empty span is a place between two characters."""


class ChatText(NamedTuple):
    """A prompt that a chat template has written, without marks. Its special tokens are in it: encode it without adding any."""

    text: str
    literals: tuple[Span, ...] = ()
    """Parts that the caller wrote, in order: a control token that touches one is plain text."""


class Fragment(str):
    """A short text that some control token has inside. It is compared as it stands, and written between marks.

    Words of schemas are among these. Marks in them would hide them from a template that compares them.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "".join((EDGE, self, EDGE))

    def __add__(self, other: str) -> str:
        return str(self) + str(other)

    def __radd__(self, other: str) -> str:
        return str(other) + str(self)

    def __getitem__(self, at: Any) -> str:
        return Fragment(super().__getitem__(at))

    def wrap_result(self, result: Any) -> Any:
        """What a method or a filter made of it: texts are the caller's too."""
        if isinstance(result, list):
            return [self.wrap_result(each) for each in result]
        return Fragment(result) if isinstance(result, str) else result


def is_marked(text: str) -> bool:
    """True if there are marks in it."""
    return OPEN in text or CLOSE in text or EDGE in text


def without_marks(text: str) -> str:
    """The text with all marks removed."""
    return _ANY.sub("", text) if is_marked(text) else text


def restore_marks(document: str) -> str:
    """JSON in ASCII, its marks as characters again."""
    return _ESCAPED.sub(lambda match: match[1] + chr(0xE0100 + int(match[2], 16)), document)


def split_literals(text: str, is_token: Callable[[str], bool]) -> ChatText:
    """A prompt and the caller's parts of it. A mark whose other one a template left out is a place between two characters."""
    pieces, literals, at, size = list[str](), list[Span](), 0, 0
    for match in _PIECES.finditer(text):
        inside = match[1] or ""
        pieces += [text[at : match.start()], inside]
        start = size + match.start() - at
        at, size = match.end(), start + len(inside)
        literals += [(start, size)] if not inside or is_token(inside) else [(start, start), (size, size)]
    return ChatText("".join([*pieces, text[at:]]), tuple(literals))


def touches(literals: Sequence[Span], span: Span) -> bool:
    """True if a span shares characters with one of the parts, or has one of the places inside."""
    before = bisect_left(literals, (span[1],))
    return before > 0 and span[0] < literals[before - 1][1]


def method_of(text: str, name: str) -> Callable[..., Any] | None:
    """A method of a text with marks, as the text without them has it; None where marks change nothing."""
    return partial(_METHODS[name], text) if name in _METHODS and is_marked(text) else None


def strip(text: str, letters: str | None = None, *, left: bool = True, right: bool = True) -> str:
    """`text.strip(letters)`. Marks among the letters that go stay."""
    passed = (_WHITE if letters is None else letters) + MARKS
    start = len(text) - len(text.lstrip(passed)) if left else 0
    end = max(start, len(text.rstrip(passed))) if right else len(text)
    return "".join((*_ANY.findall(text[:start]), text[start:end], *_ANY.findall(text[end:])))


def _split(text: str, separator: str | None = None, maxsplit: int = -1, *, from_right: bool = False) -> list[str]:
    """`text.split`. Where it is split at a token's text, the token's marks go with it."""
    pieces = text.rsplit(separator, maxsplit) if from_right else text.split(separator, maxsplit)
    if separator is None:
        return pieces
    opened = [piece.removesuffix(OPEN) for piece in pieces[:-1]] + pieces[-1:]
    return opened[:1] + [piece.removeprefix(CLOSE) for piece in opened[1:]]


_METHODS: dict[str, Callable[..., Any]] = {
    "strip": strip,
    "lstrip": partial(strip, right=False),
    "rstrip": partial(strip, left=False),
    "split": _split,
    "rsplit": partial(_split, from_right=True),
    "startswith": lambda text, *given: without_marks(text).startswith(*given),
    "endswith": lambda text, *given: without_marks(text).endswith(*given),
}
