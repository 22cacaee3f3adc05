"""Lines of a batch's input file, `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, and their validation."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attend.model.errors import AttendError, InvalidRequest
from attend.model.params import describe
from attend.service.batch.batches import MAX_ERRORS, problem
from attend.service.batch.folder import opener
from attend.service.errors import wire

MAX_CUSTOM_ID = 512
ENVELOPE = 8 << 10
"""Bytes that a line may have beside its body."""
CHUNK = 16 << 10
"""Bytes that are read and checked at a time, and the rest of the last line."""

Parse = Callable[[bytes], dict[str, Any]]
"""A strict reader of a JSON object, which raises InvalidRequest."""


class BadLine(InvalidRequest):
    """A line that stops its batch. `code` tells why."""

    def __init__(self, message: str, field: str | None, code: str) -> None:
        super().__init__(message, field)
        self.code = code


@dataclass(frozen=True, slots=True)
class Raw:
    """A line as it stands in its file; lines count from 1."""

    number: int
    text: bytes
    """Empty where it is too long to be read."""


@dataclass(frozen=True, slots=True)
class Line:
    """The request that a line of the input file holds."""

    custom_id: str
    body: dict[str, Any]


class Reader:
    """The lines of a file, a few at a time; empty ones are left out, but count. For one thread at a time."""

    def __init__(self, path: Path, max_bytes: int, max_lines: int | None = None) -> None:
        """`max_bytes`: of a line. `max_lines`: the line after so many is the last one that is read."""
        self.is_over = False
        """True if no line follows."""
        self._file = open(path, "rb", buffering=1 << 16, opener=opener)  # noqa: SIM115 - `close` closes it
        self._max_bytes, self._max_lines = max_bytes, max_lines
        self._number = 0
        self._is_inside = False
        """True if it stands inside a line that is too long."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def some(self) -> list[Raw]:
        """The next lines; there may be none among the next CHUNK bytes."""
        found: list[Raw] = []
        size = 0
        while size < CHUNK and not self.is_over:
            text = self._file.readline(CHUNK if self._is_inside else self._max_bytes + 2)
            size += len(text)
            self.is_over = not text
            if self._is_inside:
                self._is_inside = not text.endswith(b"\n")
            elif text and (raw := self._next(text)) is not None:
                found.append(raw)
        return found

    def _next(self, text: bytes) -> Raw | None:
        self._number += 1
        self._is_inside = len(text) > self._max_bytes + 1 and not text.endswith(b"\n")
        if self._max_lines is not None and self._number > self._max_lines:
            self.is_over = True
            return Raw(self._number, b"")
        if self._is_inside or len(text.rstrip(b"\r\n")) > self._max_bytes:
            return Raw(self._number, b"")
        stripped = text.strip()
        return Raw(self._number, stripped) if stripped else None


def read_line(raw: Raw, endpoint: str, parse: Parse, most: int) -> Line:
    """A line's request. Raises BadLine."""
    if not raw.text:
        raise BadLine(f"the line must be at most {most} bytes", None, "line_too_long")
    try:
        fields = parse(raw.text)
    except InvalidRequest as error:
        raise BadLine(str(error).replace("the body", "the line"), None, "invalid_json_line") from error
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise _wrong("custom_id", f"a string of 1 to {MAX_CUSTOM_ID} characters", fields, "invalid_custom_id")
    if fields.get("method") != "POST":
        raise _wrong("method", "'POST'", fields, "invalid_method")
    if fields.get("url") != endpoint:
        raise _wrong("url", f"{endpoint!r}, the endpoint of the batch", fields, "invalid_url")
    if not isinstance(body, dict):
        raise _wrong("body", "an object", fields, "invalid_value")
    if body.get("stream"):
        raise BadLine("body.stream must be false: a batch has no streams", "body.stream", "unsupported_value")
    return Line(custom_id, body)


def _wrong(name: str, wanted: str, fields: dict[str, Any], code: str) -> BadLine:
    if fields.get(name) is None:
        return BadLine(f"{name} is required: it must be {wanted}", name, code)
    return BadLine(f"{name} must be {wanted}; got {describe(fields[name])}", name, code)


def body_of(line: Line) -> bytes:
    """The body, as a caller would send it to the route."""
    return json.dumps(line.body, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(slots=True)
class Check:
    """The check of a whole file. `errors` has the first MAX_ERRORS of them."""

    endpoint: str
    parse: Parse
    most_bytes: int
    most_lines: int
    check_model: Callable[[str], None]
    """Check that a line's model is served. Raises ModelNotFound."""
    total: int = 0
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    is_over: bool = False
    """True if nothing that follows is looked at."""
    _seen_ids: set[bytes] = field(default_factory=set)

    def look(self, lines: list[Raw]) -> None:
        """Check lines, in their order."""
        for raw in lines:
            if not self.is_over:
                self.errors += self._of(raw)
                self.is_over |= len(self.errors) >= MAX_ERRORS

    def end(self) -> None:
        """End the check: a file without a line is an error."""
        if not self.total and not self.errors:
            self.errors.append(problem("empty_file", "the input file has no line", None, "input_file_id"))

    def _of(self, raw: Raw) -> Iterator[dict[str, Any]]:
        if raw.number > self.most_lines:
            message = f"the input file must have at most {self.most_lines} lines, empty ones included"
            self.is_over = True
            yield problem("too_many_lines", message, raw.number)
            return
        try:
            line = read_line(raw, self.endpoint, self.parse, self.most_bytes)
        except BadLine as error:
            yield problem(error.code, str(error), raw.number, error.field)
            return
        self.total += 1
        digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen_ids:
            message = f"custom_id must differ from line to line; {describe(line.custom_id)} is there twice"
            yield problem("duplicate_custom_id", message, raw.number, "custom_id")
        self._seen_ids.add(digest)
        model = line.body.get("model")
        if model is not None and not isinstance(model, str):
            yield problem("invalid_value", f"body.model must be a string; got {describe(model)}", raw.number, "body.model")
        elif self.model is None:
            self.model = model or ""
            try:
                self.check_model(self.model)
            except AttendError as error:
                yield problem(wire(error).code, str(error), raw.number, "body.model")
        elif self.model != (model or ""):
            message = f"all lines must name one model; the first names {describe(self.model)}, this one {describe(model)}"
            yield problem("mismatched_model", message, raw.number, "body.model")
