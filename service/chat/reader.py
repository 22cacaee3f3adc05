"""The incremental reader that tool call parsers share: text in pieces, and the parts made of it.

Each function that may need more text is a generator: it yields where it does, and goes on when there is some.
"""

from collections.abc import Collection, Generator, Mapping
from functools import lru_cache

from attend.service.chat.arguments import ANY, TEXT, ArgumentTypes, Values
from attend.service.chat.parts import CallArguments, CallStart, Part, Tool


class NotACall(Exception):
    """The text cannot be a call, or not any longer."""


class Reader:
    """Text with a place in it. What was read since the last certain part is remembered: it may turn out to be content."""

    def __init__(self, tools: Collection[Tool], *, calls_formed: bool = False) -> None:
        """`calls_formed`: calls follow a grammar, which writes as JSON what is not of type string."""
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._calls_formed = calls_formed
        self._admitted = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}
        self.text, self.at = "", 0
        self.ended = False
        """True if the answer has ended: no more text comes."""
        self.complete = True
        """True if the model ended the text itself."""
        self.num_calls = self.num_whole = 0
        """Calls, and those of them whose arguments have come to their end."""
        self.parts: list[Part] = []
        self.read: list[str] = []
        """Text since the last certain part."""

    def values_of(self, name: str, key: str) -> Values:
        """What an argument of a tool may be, where it is written as plain text."""
        if not self._calls_formed:
            return self._admitted[name].argument(key)
        schema = self.tools[name].parameters.get("properties", {}).get(key)
        return TEXT if isinstance(schema, dict) and schema.get("type") == "string" else ANY

    def char(self) -> Generator[None, None, str]:
        """The next character, left in place; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def take(self, count: int = 1) -> str:
        """Take characters that are there."""
        self.at += count
        self.read.append(self.text[self.at - count : self.at])
        return self.read[-1]

    def spaces(self) -> Generator[None, None, str]:
        """Consume white space; the character after it, left in place."""
        while (character := (yield from self.char())).isspace():
            self.take()
        return character

    def literal(self, *options: str, skip_spaces: bool = False) -> Generator[None, None, str]:
        """Take the one of the texts that follows, none of which begins another; "" for none, of which nothing is taken.
        `skip_spaces`: white space may come before it.
        """
        if skip_spaces:
            yield from self.spaces()
        longest = max(map(len, options))
        while True:
            rest = self.text[self.at : self.at + longest]
            found = next((option for option in options if rest.startswith(option)), "")
            if found:
                return self.take(len(found))
            if self.ended:
                self.drop_half(options)
                return ""
            if not any(option.startswith(rest) for option in options):
                return ""
            yield

    def require(self, *options: str, skip_spaces: bool = False) -> Generator[None, None, str]:
        """As `literal`. Raises NotACall for none."""
        found = yield from self.literal(*options, skip_spaces=skip_spaces)
        if not found:
            raise NotACall
        return found

    def until(self, end: str) -> Generator[None, None, str]:
        """Take text and the `end` after it; the text without it. Raises NotACall where it does not come."""
        pieces = []
        while True:
            at = self.text.find(end, self.at)
            if at >= 0:
                pieces.append(self.take(at - self.at))
                self.take(len(end))
                return "".join(pieces)
            if self.ended:
                self.drop_half((end,))
                raise NotACall
            keep = partial_marker(self.text, self.at, (end,))
            pieces.append(self.take(len(self.text) - keep - self.at))
            yield

    def drop_half(self, markers: Collection[str]) -> None:
        """Go past what is left at the end, where that is the beginning of a marker that a limit broke off."""
        if self.is_half(self.text[self.at :], markers):
            self.at = len(self.text)

    def is_half(self, end: str, markers: Collection[str]) -> bool:
        """True if the end of the text is the beginning of a marker that a limit broke off."""
        return end != "" and not self.complete and any(marker.startswith(end) for marker in markers)

    def put_back(self, mark: int) -> None:
        """Go back to where the reader held so many texts."""
        self.text, self.at = "".join(self.read[mark:]) + self.text[self.at :], 0
        del self.read[mark:]

    def start(self, name: str) -> int:
        """A call is certain, and with it what was read. Its index."""
        self.parts.append(CallStart(self.num_calls, name))
        self.read.clear()
        self.num_calls += 1
        return self.num_calls - 1

    def whole_call(self, name: str, text: str) -> None:
        """A call whose arguments are known."""
        self.arguments(self.start(name), text)
        self.num_whole += 1

    def arguments(self, index: int, text: str) -> None:
        """A piece of the arguments of a call."""
        if text:
            self.parts.append(CallArguments(index, text))
        self.read.clear()


def partial_marker(text: str, at: int, markers: tuple[str, ...]) -> int:
    """Characters at the end of a text, from `at` on, that begin a marker and are not all of one."""
    starts, halves, longest = _halves(markers)
    for start in range(max(at, len(text) - longest), len(text)):
        if text[start] in starts and text[start:] in halves:
            return len(text) - start
    return 0


def starts_of(markers: tuple[str, ...]) -> frozenset[str]:
    """The first characters of the markers."""
    return _halves(markers)[0]


@lru_cache(256)
def _halves(markers: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str], int]:
    """The first characters of the markers, what begins one and is not all of it, and how long that can be."""
    halves = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return frozenset(marker[0] for marker in markers), halves, max(map(len, halves), default=0)
