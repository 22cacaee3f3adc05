"""Incremental recognition of one JSON value (RFC 8259): where it ends, and where it stops being valid."""

import re
from collections.abc import Callable

MAX_DEPTH = 64
MAX_ATOM = 512
"""The most characters of a number."""
_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGINNING = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_WORDS = ("true", "false", "null")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


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
        self._atom = ""
        self._hex_left = 0
        self._in_key = False
        self._written: list[str] = []
        self._step: Callable[[str, int], int] = self._value

    def take(self, text: str, at: int = 0) -> tuple[str, int]:
        """Follow `text` from `at` on. What was taken, as JSON, and where the rest begins."""
        self._written = []
        while at < len(text) and not self.complete and not self.broken:
            at = self._step(text, at)
        return "".join(self._written), at

    @property
    def in_string(self) -> bool:
        """True if what was taken ends inside a string."""
        return not self.broken and self._step in (self._string, self._escape, self._hex)

    def end(self) -> None:
        """No text follows: a number may be complete now."""
        if self._step == self._rest_of_atom and not self._closers:
            self._end_atom()

    def _write(self, text: str, then: Callable[[str, int], int] | None = None) -> None:
        self._written.append(text)
        if then is not None:
            self._step = then

    def _value(self, text: str, at: int) -> int:
        """Take the first characters of a value; returns the place after them."""
        if space := _SPACE.match(text, at):
            self._write(space.group())
            return space.end()
        character = text[at]
        if character in "{[" and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            self._write(character, self._first_key if character == "{" else self._first_item)
        elif character == '"':
            self._write(character, self._string)
        elif character == "-" or (character.isascii() and character.isalnum()):
            self._atom, self._step = "", self._rest_of_atom
            return at
        else:
            self.broken = True
            return at
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "]" else self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if space := _SPACE.match(text, at):
            self._write(space.group())
            return space.end()
        if text[at] != '"':
            self.broken = True
            return at
        self._in_key = True
        self._write('"', self._string)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if plain := _PLAIN.match(text, at):
            self._write(plain.group())
            return plain.end()
        if text[at] == "\\":
            self._write("\\", self._escape)
        elif text[at] == '"':
            self._end_string()
        else:
            self._write(f"\\u{ord(text[at]):04x}")
        return at + 1

    def _end_string(self) -> None:
        self._write('"', self._colon if self._in_key else self._after)
        if not self._in_key:
            self._end_value()
        self._in_key = False

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_left = 4
            self._write("u", self._hex)
        elif text[at] in _ESCAPED:
            self._write(text[at], self._string)
        else:
            self.broken = True
            return at
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            self.broken = True
            return at
        self._hex_left -= 1
        self._write(text[at], None if self._hex_left else self._string)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._write(":", self._value)
        elif text[at] in " \t\n\r":
            self._write(text[at])
        else:
            self.broken = True
            return at
        return at + 1

    def _rest_of_atom(self, text: str, at: int) -> int:
        """A number or a word, a character at a time. It has ended where one follows that it cannot have."""
        character = text[at]
        if not (character.isascii() and character.isalnum()) and character not in "+-.":
            self._end_atom()
            return at
        atom = self._atom + character
        begins = _NUMBER_BEGINNING.fullmatch(atom) or any(word.startswith(atom) for word in _WORDS)
        if not begins or len(atom) > MAX_ATOM:
            self.broken = True
            return at
        self._atom = atom
        self._write(character)
        return at + 1

    def _end_atom(self) -> None:
        if _NUMBER.fullmatch(self._atom) or self._atom in _WORDS:
            self._step = self._after
            self._end_value()
        else:
            self.broken = True

    def _after(self, text: str, at: int) -> int:
        """What may follow a value inside another."""
        character = text[at]
        if character in " \t\n\r":
            self._write(character)
        elif character == ",":
            self._write(character, self._key if self._closers[-1] == "}" else self._value)
        elif character == self._closers[-1]:
            self._closers.pop()
            self._write(character, self._after)
            self._end_value()
        else:
            self.broken = True
            return at
        return at + 1

    def _end_value(self) -> None:
        self.complete = not self._closers
