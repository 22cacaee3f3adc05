"""Parts of an answer: content, reasoning, tool calls. A stream is a list of parts; equal neighbours are deltas."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Content of an answer: text that is neither reasoning nor a tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call `index` of the answer, from 0, begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`: together they are one JSON object, unless the model did not end it."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """A JSON schema of its arguments, which are an object."""
    strict: bool = False
    """True if arguments must obey the schema."""
    place: str = field(default="tools[0].function.parameters", compare=False)
    """Where the schema stands in the request."""


def join_deltas(parts: Iterable[Part]) -> list[Part]:
    """The parts with their deltas put together."""
    return [_whole(list(run)) for _, run in groupby(parts, lambda part: (type(part), getattr(part, "index", 0)))]


def _whole(run: list[Part]) -> Part:
    first = run[0]
    if isinstance(first, CallStart) or len(run) == 1:
        return first
    return replace(first, text="".join(part.text for part in run if not isinstance(part, CallStart)))


def call_id(*about: object) -> str:
    """The id of a tool call, made of what tells it from every other, so that nothing has to be kept.

    Nine letters and digits: the templates of Mistral take no other.
    """
    number, digits = int.from_bytes(hashlib.blake2s(repr(about).encode(), digest_size=8).digest(), "big"), ""
    while len(digits) < 9:
        number, digit = divmod(number, 36)
        digits += "0123456789abcdefghijklmnopqrstuvwxyz"[digit]
    return digits
