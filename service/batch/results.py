"""The answers of a batch on disk: appended as they come, and put in the order of their lines at the end.

They are in one file, of lines `NUMBER OUTCOME USAGE JSON`. Of two answers to a line the first counts. A last line that is cut
short is ignored. Who works on a batch holds the lock of its file (flock): the kernel frees it with the process.
"""

import errno
import fcntl
import os
import re
import stat
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
    """Where an answer lies in the part."""

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
    """The file of a batch's answers, and the right to work on the batch: nobody else has it until it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError where somebody has it, and OSError where no file can be there."""
        self.path = path
        self._lock = Lock()
        self._size = 0
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, f"{path.name} is no file")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(handle)
            raise
        self._handle: int | None = handle

    def resume(self) -> dict[int, Span]:
        """Where the answers of earlier runs lie. What is appended follows the last whole one."""
        found, self._size = spans(self.path)
        return found

    def clear(self) -> None:
        """Delete all answers."""
        with self._lock:
            if self._handle is not None:
                os.ftruncate(self._handle, 0)
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
        """Close the file: later answers are not written, and another may have the batch."""
        with self._lock:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None


def record(number: int, outcome: int, text: bytes, usage: TokenUsage = NO_TOKENS) -> bytes:
    """A line of such a file, `NUMBER OUTCOME USAGE JSON`."""
    return b"%d %d %d,%d,%d,%d %s\n" % (number, outcome, *usage, text)


def spans(path: Path) -> tuple[dict[int, Span], int]:
    """Where the answer of each line lies in a part, by its number; and the bytes of its whole lines."""
    found: dict[int, Span] = {}
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if line.endswith(b"}\n") and (match := RECORD.match(line)) is not None:
                begin = match.start(7)
                usage = TokenUsage(*map(int, match.group(3, 4, 5, 6))) if match[3] else NO_TOKENS
                found.setdefault(int(match[1]), Span(offset + begin, len(line) - begin, int(match[2]), usage))
            offset += len(line)
    return found, offset


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


def write_sorted(part: Path, spans: dict[int, Span], outcomes: set[int], target: Path) -> AnswerFile:
    """Write the answers with these outcomes into a new file, by the order of their lines; no file where there are none.

    Raises OSError, without a trace.
    """
    numbers = [number for number in sorted(spans) if spans[number].outcome in outcomes]
    if not numbers:
        return AnswerFile(0, 0)
    size = 0
    try:
        with part.open("rb") as source, target.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            for number in numbers:
                span = spans[number]
                for piece in _read(source.fileno(), span):
                    out.write(piece)
                size += span.size
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return AnswerFile(size, len(numbers))


def write_files(part: Path, output: Path, errors: Path) -> tuple[Sums, tuple[AnswerFile, AnswerFile]]:
    """Write the output file and the error file of a batch. Raises OSError, and may leave the first of them."""
    found, _ = spans(part)
    files = write_sorted(part, found, {DONE}, output), write_sorted(part, found, {FAILED, LEFT}, errors)
    return tally(found.values()), files


def _read(handle: int, span: Span) -> Iterator[bytes]:
    place, end = span.offset, span.offset + span.size
    while place < end:
        piece = os.pread(handle, min(COPY_BYTES, end - place), place)
        if not piece:
            raise OSError(f"an answer is cut at {place}")
        yield piece
        place += len(piece)
