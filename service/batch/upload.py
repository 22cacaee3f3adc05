"""File upload: a form (multipart/form-data, RFC 7578) whose file is streamed to disk, and charged before it is read."""

import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Lock

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from attend.model.errors import InvalidRequest
from attend.model.params import describe
from attend.service.batch.files import INPUT
from attend.service.batch.rows import File
from attend.service.batch.service import BatchService
from attend.service.contract.tolerance import known_fields
from attend.service.errors import TooLarge
from attend.service.remarks import Remarks

READ_BYTES = 64 << 10
"""Bytes of a body that are read and written at a time, by a thread: of the worst ones in 20 ms."""
KNOWN = frozenset(("purpose", "file", "expires_after[anchor]", "expires_after[seconds]"))
LEAST_SECONDS, MAX_SECONDS = 3600, 2_592_000
"""Of `expires_after`, as OpenAI has it."""
MAX_NAME = 255
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
        self._is_whole = False
        self._name = ""
        self._disposition, self._header, self._value = b"", bytearray(), bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: setattr(self, "_disposition", b""),
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._header_ends,
                "on_headers_finished": self._content_begins,
                "on_part_data": self._content,
                "on_part_end": self._part_ends,
                "on_end": lambda: setattr(self, "_is_whole", True),
            },
            max_header_size=MAX_HEAD_BYTES,
        )

    def feed(self, piece: bytes) -> None:
        """Take in bytes. Raises InvalidRequest, and what `take` raises."""
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            raise InvalidRequest(f"the body is not multipart/form-data: {error}") from error

    def end(self) -> None:
        """The body has ended. Raises InvalidRequest where the form has not, or has no file."""
        if not self._is_whole:
            raise InvalidRequest("the form ended early: its last boundary is missing")
        if self.filename is None:
            raise InvalidRequest("file is required", FILE)

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _content_begins(self) -> None:
        kind, named = parse_options_header(self._disposition)
        name = self._name = named.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not name:
            raise InvalidRequest("each part of the form needs a header Content-Disposition: form-data, with a name")
        if name in self.fields or (name == FILE and self.filename is not None):
            raise InvalidRequest(f"{name[:64]!r} is in the form twice", name[:64])
        if name == FILE:
            self.filename = named.get(b"filename", b"").decode(errors="replace")
        elif len(self.fields) >= MAX_FIELDS:
            raise InvalidRequest(f"the form must have at most {MAX_FIELDS} fields beside its file")

    def _content(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._take(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name[:64]} must be at most {MAX_FIELD_BYTES} bytes", self._name[:64])

    def _part_ends(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode(errors="replace")
        self._value.clear()


async def upload(
    batch_service: BatchService, owner: str, boundary: bytes, length: int | None, pieces: AsyncIterator[bytes], remarks: Remarks
) -> File:
    """The file that the form of a body becomes. `length`: bytes of the body, where the caller has said so.

    Raises InvalidRequest, TooLarge, QuotaReached, StorageFailed, and what `pieces` raises: then nothing is kept.
    """
    most = batch_service.limits.batch_file_bytes
    if length is not None and length > most + OVERHEAD:
        raise TooLarge(f"{too_large(most)}; the body has {length}")
    async with batch_service.reserve_file(owner, most if length is None else min(length, most)) as file_id:
        sink = Sink(batch_service.files.folder.file(file_id), most)
        form, read = Form(boundary, sink.write), 0
        try:
            async for piece in pieces_of(pieces, READ_BYTES):
                read += len(piece)
                if read > most + OVERHEAD:
                    raise TooLarge(too_large(most))
                await batch_service.disk(owner, form.feed, piece)
            await batch_service.disk(owner, sink.keep)
        except OSError as error:
            raise batch_service.count_failure(error) from error
        finally:
            sink.over = True
            await batch_service.disk(owner, sink.close)
        form.end()
        seconds = _read(form.fields, remarks)
        if not sink.size:
            raise InvalidRequest("file must hold at least one byte; got none", "file")
        name = "".join(letter for letter in (form.filename or "") if letter.isprintable())[:MAX_NAME]
        return await batch_service.db(batch_service.files.finish, file_id, sink.size, name, seconds)


def too_large(most: int) -> str:
    """What is said of a file of too many bytes."""
    return f"the file must be at most {most} bytes"


async def pieces_of(pieces: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """The same bytes in pieces of this size; the last one may be shorter."""
    held = bytearray()
    async for piece in pieces:
        held += piece
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)


class Sink:
    """A file that threads write. A caller who leaves waits for none of them: what comes too late is not written."""

    def __init__(self, path: Path, most: int) -> None:
        """`most`: the most bytes that it takes."""
        self.over = False
        self.size = 0
        self._path, self._most = path, most
        self._handle: int | None = None
        self._lock = Lock()

    def write(self, data: bytes) -> None:
        """Append bytes to the file. Raises TooLarge."""
        with self._lock:
            if self.over:
                return
            self.size += len(data)
            if self.size > self._most:
                raise TooLarge(too_large(self._most))
            if self._handle is None:
                self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            left = memoryview(data)
            while left:
                left = left[os.write(self._handle, left) :]

    def keep(self) -> None:
        """Have what was written outlive the machine."""
        with self._lock:
            if self._handle is not None:
                os.fsync(self._handle)

    def close(self) -> None:
        """Close the file: later bytes are not written."""
        with self._lock:
            self.over = True
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None


def _read(fields: dict[str, str], remarks: Remarks) -> int | None:
    """The seconds that the file is to live, where the form says so. Raises InvalidRequest for what is wrong with its fields."""
    for name in known_fields(fields, KNOWN, {}, remarks).keys() - KNOWN:
        meant = f": did you mean {remarks.near[name]}?" if name in remarks.near else ""
        raise InvalidRequest(f"{describe(name)} is not a field of this form{meant}", name[:64])
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest(f"purpose is required: it must be {INPUT!r}", "purpose")
    if purpose != INPUT:
        raise InvalidRequest(f"purpose must be {INPUT!r}, the only one of this server; got {describe(purpose)}", "purpose")
    anchor, text = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"expires_after[anchor] must be 'created_at'; got {describe(anchor)}", "expires_after")
    seconds = int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not LEAST_SECONDS <= seconds <= MAX_SECONDS:
        wanted = f"an integer from {LEAST_SECONDS} to {MAX_SECONDS}"
        raise InvalidRequest(f"expires_after[seconds] must be {wanted}; got {describe(text)}", "expires_after")
    return seconds
