"""Incremental recognition of one JSON value (RFC 8259): where it ends, and where it stops being valid."""

import re
from collections.abc import Callable

MAX_DEPTH = 64
MAX_ATOM = 512
"""The most characters of a number."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGINNING = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_ESCAPE_BEGINNING = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})')
_WORDS = ("true", "false", "null")


class JsonText:
    """Follows a value. The time is in proportion to the text, however it is cut.

    Control characters in strings, which JSON forbids and models write, are put down as escapes.
    """

    def __init__(self) -> None:
        self.complete = False
        """True if the JSON value has ended."""
        self.broken = False
        """The first character that was not taken cannot stand there."""
        self._closers: list[str] = []
        self._next = "value"
        """What may follow: value, item (or the end of a list), first key (or the end), key, colon, or after (a value)."""
        self._token = ""
        """What has come of a number, a word or an escape."""
        self._written: list[str] = []
        self._step: Callable[[str, int], int] = self._between

    def take(self, text: str, at: int = 0) -> tuple[str, int]:
        """Follow `text` from `at` on. What was taken, as JSON, and where the rest begins."""
        self._written = []
        while at < len(text) and not self.complete and not self.broken:
            at = self._step(text, at)
        return "".join(self._written), at

    @property
    def in_string(self) -> bool:
        """True if what was taken ends inside a string."""
        return not self.broken and self._step in (self._string, self._escape)

    def end(self) -> None:
        """No text follows: a number may be complete now."""
        if self._step == self._atom and not self._closers:
            self._end_atom()

    def _between(self, text: str, at: int) -> int:
        """Take a character outside of strings, numbers and words; returns the place after it."""
        character, expects = text[at], self._next
        starts = expects in ("value", "item")
        if character in " \t\n\r":
            pass
        elif character == '"' and expects not in ("colon", "after"):
            self._step, self._next = self._string, "after" if starts else "colon"
        elif character in "{[" and starts and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            self._next = "first key" if character == "{" else "item"
        elif expects in ("item", "first key", "after") and character == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        elif character == ":" and expects == "colon":
            self._next = "value"
        elif character == "," and expects == "after":
            self._next = "key" if self._closers[-1] == "}" else "value"
        elif starts and (character == "-" or (character.isascii() and character.isalnum())):
            self._token, self._step = "", self._atom
            return at
        else:
            self.broken = True
            return at
        self._written.append(character)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if plain := _PLAIN.match(text, at):
            self._written.append(plain.group())
            return plain.end()
        character = text[at]
        if character == "\\":
            self._token, self._step = character, self._escape
        elif character == '"' and self._next == "colon":
            self._step = self._between
        elif character == '"':
            self._end_value()
        else:
            character = f"\\u{ord(character):04x}"
        self._written.append(character)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        token = self._token + text[at]
        if not _ESCAPE_BEGINNING.fullmatch(token):
            self.broken = True
            return at
        self._token = token
        if len(token) == (6 if token[1] == "u" else 2):
            self._step = self._string
        self._written.append(text[at])
        return at + 1

    def _atom(self, text: str, at: int) -> int:
        """A number or a word, a character at a time. It has ended where one follows that it cannot have."""
        character = text[at]
        if not (character.isascii() and character.isalnum()) and character not in "+-.":
            self._end_atom()
            return at
        token = self._token + character
        begins = _NUMBER_BEGINNING.fullmatch(token) or any(word.startswith(token) for word in _WORDS)
        if not begins or len(token) > MAX_ATOM:
            self.broken = True
            return at
        self._token = token
        self._written.append(character)
        return at + 1

    def _end_atom(self) -> None:
        if _NUMBER.fullmatch(self._token) or self._token in _WORDS:
            self._end_value()
        else:
            self.broken = True

    def _end_value(self) -> None:
        self._next, self._step = "after", self._between
        self.complete = not self._closers
