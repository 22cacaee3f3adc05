"""multipart/form-data (RFC 7578), read by python-multipart as it comes: of its one file nothing is kept, of the rest little."""

import logging
import re
from collections.abc import Callable

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from attend.model.errors import InvalidRequest

MAX_FIELDS, MAX_FIELD_BYTES, MAX_HEAD_BYTES = 16, 1024, 4096
"""Fields beside the file, bytes of each, and bytes of a line of the header of a part."""
OVERHEAD = MAX_FIELDS * (MAX_FIELD_BYTES + MAX_HEAD_BYTES)
"""Bytes that a body may have beside its file."""
BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
FILE = "file"
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs each body that it refuses, and we answer it


def boundary_of(content_type: str) -> bytes:
    """The boundary that a header Content-Type names. Raises InvalidRequest."""
    boundary = b""
    if content_type.isascii():
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("the Content-Type multipart/form-data must name a boundary of 1 to 70 characters")
    return boundary


class Form:
    """A form that comes in pieces, for one thread at a time. `take` gets the bytes of its file; `fields` has the rest."""

    def __init__(self, boundary: bytes, take: Callable[[bytes], None]) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Of the file, once its part has begun."""
        self._take = take
        self._has_begun = self._has_ended = False
        self._num_parts = 0
        self._name = ""
        self._header, self._value = bytearray(), bytearray()
        self._dispositions: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._header_ends,
                "on_headers_finished": self._content_begins,
                "on_part_data": self._content,
                "on_part_end": self._part_ends,
                "on_end": self._ends,
            },
            max_header_size=MAX_HEAD_BYTES,
        )

    def feed(self, piece: bytes) -> None:
        """Take in bytes. Raises InvalidRequest, and what `take` raises."""
        if piece and not self._has_begun:
            self._has_begun = True
            if not piece.startswith(b"-"):  # the parser passes over line ends and what follows them
                raise InvalidRequest("the form must begin with the boundary that its Content-Type names")
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            raise InvalidRequest(f"the body is not multipart/form-data: {error}") from error

    def end(self) -> None:
        """The body has ended. Raises InvalidRequest where the form has not, or has no file."""
        if not self._has_ended:
            raise InvalidRequest("the form ended early: its last boundary is missing")
        if self.filename is None:
            raise InvalidRequest("file is required", FILE)

    def _part_begins(self) -> None:
        self._dispositions.clear()
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS + 1:
            raise InvalidRequest(f"the form must have at most {MAX_FIELDS} fields beside its file")

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._dispositions.append(bytes(self._value))
        self._header.clear()
        self._value.clear()

    def _content_begins(self) -> None:
        name, filename = _disposition(self._dispositions)
        if name in self.fields or (name == FILE and self.filename is not None):
            raise InvalidRequest(f"{name[:64]!r} is in the form twice", name[:64])
        if name == FILE:
            self.filename = filename or ""
        self._name = name

    def _content(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._take(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name[:64]} must be at most {MAX_FIELD_BYTES} bytes", self._name[:64])

    def _part_ends(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = _text(bytes(self._value), self._name[:64])
        self._value.clear()

    def _ends(self) -> None:
        self._has_ended = True


def _disposition(headers: list[bytes]) -> tuple[str, str | None]:
    """The name of a part, and the name of its file. Raises InvalidRequest."""
    if len(headers) == 1:
        kind, named = parse_options_header(headers[0])
        name = _text(named.get(b"name", b""), "the header of a part of the form")
        if kind == b"form-data" and name.isprintable() and name:
            filename = named.get(b"filename")
            return name, None if filename is None else _text(filename, "the name of the file")
    raise InvalidRequest("each part of the form needs one header Content-Disposition: form-data, with a name")


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what} must be UTF-8") from error
