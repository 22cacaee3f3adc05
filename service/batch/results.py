"""The answers of a batch on disk: appended as they come, and put in the order of their lines at the end.

Each runner that takes a batch writes a file of its own, a part, of lines `NUMBER OUTCOME USAGE JSON`: so two runners never
write one file, though the first froze and goes on. Of two answers to a line the first counts. A last line that is cut short
is ignored.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import orjson

from attend.service.records import NO_TOKENS, TokenUsage

FAILED, DONE, LEFT = 0, 1, 2
"""Outcomes of a line: answered with an error; answered; not computed before the batch ended."""
RECORD = re.compile(rb"(\d{1,9}) ([012]) (?:(\d+),(\d+),(\d+),(\d+) )?(\{)")
COPY_BYTES = 1 << 20
Sums = tuple[int, int, TokenUsage]
"""Lines that are answered, those that are answered with an error, and the tokens of the answers."""


class Span(NamedTuple):
    """Where an answer lies in the parts."""

    part: int
    offset: int
    size: int
    outcome: int
    usage: TokenUsage = NO_TOKENS


def success(batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """An answer of a route, as a line of an output or error file. `body` is its JSON."""
    head = {"id": _request(batch_id, number), "custom_id": custom_id}
    inside = {"status_code": status, "request_id": request_id}
    flat = body.replace(b"\n", b" ")  # none of ours has one
    return b'%s,"response":%s,"body":%s},"error":null}' % (_open(head), _open(inside), flat)


def failed_line(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """A line that no route was asked for, as a line of an error file."""
    whole = {"id": _request(batch_id, number), "custom_id": custom_id, "response": None}
    return orjson.dumps(whole | {"error": {"code": code, "message": message}})


def _open(document: Mapping[str, object]) -> bytes:
    return orjson.dumps(document)[:-1]


def _request(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


class Part:
    """The file that one runner appends its answers to."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._lock = Lock()
        self._size = 0

    def append(self, whole: bytes) -> None:
        """Add a `record`, or nothing where that raises OSError, as on a full disk."""
        with self._lock:
            if self._handle is None:
                raise OSError("the batch's file is closed")
            os.ftruncate(self._handle, self._size)  # what an append left that failed
            left = memoryview(whole)
            while left:
                left = left[os.write(self._handle, left) :]
            self._size += len(whole)

    def close(self) -> None:
        """Close the file: later answers are not written."""
        with self._lock:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None


def record(number: int, outcome: int, text: bytes, usage: TokenUsage = NO_TOKENS) -> bytes:
    """A line of such a file, `NUMBER OUTCOME USAGE JSON`."""
    return b"%d %d %d,%d,%d,%d %s\n" % (number, outcome, *usage, text)


def spans(parts: Iterable[Path]) -> dict[int, Span]:
    """Where the answer of each line lies, by its number."""
    found: dict[int, Span] = {}
    for index, path in enumerate(parts):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"}\n") and (match := RECORD.match(line)) is not None:
                    begin = match.start(7)
                    usage = TokenUsage(*map(int, match.group(3, 4, 5, 6))) if match[3] else NO_TOKENS
                    span = Span(index, offset + begin, len(line) - begin, int(match[2]), usage)
                    found.setdefault(int(match[1]), span)
                offset += len(line)
    return found


def tally(spans: Iterable[Span]) -> Sums:
    """Lines that are answered, those that are answered with an error, and the tokens of the answers."""
    done = failed = 0
    usage = NO_TOKENS
    for span in spans:
        done, failed = done + (span.outcome == DONE), failed + (span.outcome == FAILED)
        usage = usage.plus(span.usage)
    return done, failed, usage


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """A file of answers: bytes, which may be none."""

    size: int
    count: int


def write_sorted(parts: list[Path], spans: dict[int, Span], outcomes: set[int], target: Path) -> AnswerFile:
    """Write the answers with these outcomes into a new file, by the order of their lines; no file where there are none.

    Raises OSError, without a trace.
    """
    numbers = [number for number in sorted(spans) if spans[number].outcome in outcomes]
    if not numbers:
        return AnswerFile(0, 0)
    handles = [os.open(path, os.O_RDONLY) for path in parts]
    size = 0
    try:
        with target.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            for number in numbers:
                span = spans[number]
                for piece in _read(handles[span.part], span):
                    out.write(piece)
                size += span.size
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        for handle in handles:
            os.close(handle)
    return AnswerFile(size, len(numbers))


def write_files(parts: list[Path], output: Path, errors: Path) -> tuple[Sums, tuple[AnswerFile, AnswerFile]]:
    """Write the output file and the error file of a batch. Raises OSError, and may leave the first of them."""
    found = spans(parts)
    files = write_sorted(parts, found, {DONE}, output), write_sorted(parts, found, {FAILED, LEFT}, errors)
    return tally(found.values()), files


def _read(handle: int, span: Span) -> Iterator[bytes]:
    place, end = span.offset, span.offset + span.size
    while place < end:
        piece = os.pread(handle, min(COPY_BYTES, end - place), place)
        if not piece:
            raise OSError(f"an answer is cut at {place}")
        yield piece
        place += len(piece)
