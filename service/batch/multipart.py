"""multipart/form-data (RFC 7578), read as it comes: of the one file nothing is kept, of the other fields little.

It is strict: what a client of HTTP would not write is refused, so that nothing in front of the server can read it otherwise.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from attend.model.errors import InvalidRequest

MAX_FIELDS, MAX_FIELD_BYTES, MAX_HEAD_BYTES = 16, 1024, 4096
"""Fields beside the file, bytes of each, and bytes of the header of a part."""
OVERHEAD = MAX_FIELDS * (MAX_FIELD_BYTES + MAX_HEAD_BYTES)
"""Bytes that a body may have beside its file."""
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER = re.compile(r';[ \t]*([A-Za-z0-9_*-]+)[ \t]*=[ \t]*("(?:[^"\\\r\n]|\\.)*"|[^\s;"]+)[ \t]*')
FILE = "file"


def boundary_of(content_type: str) -> bytes:
    """The boundary that a header Content-Type names. Raises InvalidRequest."""
    named = dict(_parameters(content_type.partition(";")[1] + content_type.partition(";")[2]))
    boundary = named.get("boundary", "")
    if not BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("the Content-Type multipart/form-data must name a boundary of 1 to 70 characters")
    return boundary.encode("ascii")


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """The parameters of a header, with names in lower case."""
    place = 0
    while (found := _PARAMETER.match(text, place)) is not None:
        value = found[2]
        if value.startswith('"'):
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        yield found[1].lower(), value
        place = found.end()


@dataclass(slots=True)
class Form:
    """A form that comes in pieces. `feed` gives the bytes of the file as they come; `fields` has the rest, `end` checks it."""

    boundary: bytes
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    """Of the file, once its part has begun."""
    _buffer: bytearray = field(default_factory=bytearray)
    _state: str = "begin"
    _name: str = ""
    _value: bytearray = field(default_factory=bytearray)
    _num_parts: int = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Take in bytes. Raises InvalidRequest."""
        self._buffer += piece
        before: tuple[str, int] | None = None
        while before != (before := (self._state, len(self._buffer))):
            if self._state == "begin":
                self._begin()
            elif self._state == "line":
                self._line()
            elif self._state == "head":
                self._head()
            elif self._state == "content":
                found, ended = self._content()
                if self._name != FILE:
                    self._more(found, ended=ended)
                elif found:
                    yield found
            else:
                self._buffer.clear()  # an epilogue, which nobody reads

    def end(self) -> None:
        """The body has ended. Raises InvalidRequest where the form has not, or has no file."""
        if self._state != "over":
            raise InvalidRequest("the form ended early: its last boundary is missing")
        if self.filename is None:
            raise InvalidRequest("file is required", FILE)

    def _begin(self) -> None:
        opening = b"--" + self.boundary
        if len(self._buffer) < len(opening):
            return
        if not self._buffer.startswith(opening):
            raise InvalidRequest("the form must begin with the boundary that its Content-Type names")
        del self._buffer[: len(opening)]
        self._state = "line"

    def _line(self) -> None:
        """What follows a boundary: a part, or the end."""
        if len(self._buffer) < 2:
            return
        if self._buffer.startswith(b"--"):
            self._state = "over"
        elif self._buffer.startswith(b"\r\n"):
            self._state = "head"
        else:
            raise InvalidRequest("the form is not multipart/form-data: a boundary must end its line")
        del self._buffer[:2]

    def _head(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._buffer) > MAX_HEAD_BYTES + 4):
            raise InvalidRequest(f"the header of a part of the form must be at most {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return
        name, filename = _disposition(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS + 1:
            raise InvalidRequest(f"the form must have at most {MAX_FIELDS} fields beside its file")
        if name in self.fields or (name == FILE and self.filename is not None):
            raise InvalidRequest(f"{name[:64]!r} is in the form twice", name[:64])
        if name == FILE:
            self.filename = "" if filename is None else filename
        self._name, self._value = name, bytearray()
        self._state = "content"

    def _content(self) -> tuple[bytes, bool]:
        """As much of a part's content as is known to be that, and whether it is the rest."""
        closing = b"\r\n--" + self.boundary
        end = self._buffer.find(closing)
        sure = end if end >= 0 else max(0, len(self._buffer) - len(closing) + 1)
        found = bytes(self._buffer[:sure])
        del self._buffer[: sure + (len(closing) if end >= 0 else 0)]
        if end >= 0:
            self._state = "line"
        return found, end >= 0

    def _more(self, piece: bytes, *, ended: bool) -> None:
        """Add a piece to the value of a field. Raises InvalidRequest where it is too long, or not UTF-8."""
        self._value += piece
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name[:64]} must be at most {MAX_FIELD_BYTES} bytes", self._name[:64])
        if ended:
            try:
                self.fields[self._name] = self._value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"{self._name[:64]} must be UTF-8", self._name[:64]) from error


def _disposition(head: bytes) -> tuple[str, str | None]:
    """The name of a part, and the name of its file. Raises InvalidRequest."""
    try:
        lines = head.decode("utf-8").split("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("the header of a part of the form must be UTF-8") from error
    values = [value for header, _, value in (line.partition(":") for line in lines) if header.lower() == "content-disposition"]
    if len(values) == 1:
        kind, semicolon, rest = values[0].strip().partition(";")
        named = dict(_parameters(semicolon + rest))
        if kind.strip().lower() == "form-data" and (name := named.get("name")) and name.isprintable():
            return name, named.get("filename")
    raise InvalidRequest("each part of the form needs one header Content-Disposition: form-data, with a name")
