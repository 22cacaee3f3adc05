"""The answers of a batch on disk: appended as they come, and put in the order of their lines at the end.

They are in one file, of lines `NUMBER OUTCOME USAGE JSON`. Of two answers to a line the first counts. A last line that is cut
short is ignored.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import orjson

from attend.service.batch.rows import Counts
from attend.service.records import NO_TOKENS, TokenUsage

FAILED, DONE, LEFT = 0, 1, 2
"""Outcomes of a line: answered with an error; answered; not computed before the batch ended."""
RECORD = re.compile(rb"(\d{1,9}) ([012]) (?:(\d+),(\d+),(\d+),(\d+) )?(\{)")
COPY_BYTES = 1 << 20


class Entry(NamedTuple):
    """An answer to a line, as its line in the output or error file."""

    number: int
    outcome: int
    text: bytes
    usage: TokenUsage = NO_TOKENS


class Span(NamedTuple):
    """Where an answer lies in the file."""

    offset: int
    size: int
    outcome: int
    usage: TokenUsage = NO_TOKENS


def success(batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """An answer of a route, as a line of an output or error file. `body` is its JSON."""
    flat = orjson.Fragment(body.replace(b"\n", b" "))  # none of ours has one
    return _line(batch_id, number, custom_id, {"status_code": status, "request_id": request_id, "body": flat}, None)


def failed_line(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """A line that no route was asked for, as a line of an error file."""
    return _line(batch_id, number, custom_id, None, {"code": code, "message": message})


def _line(batch_id: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return orjson.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error})


class AnswerLog:
    """The file of a batch's answers, from any thread. `counts` says how many lines have one."""

    def __init__(self, path: Path, total: int) -> None:
        """`total`: the lines of the batch, where they are known. Raises OSError where no file can be there."""
        self.path, self.counts, self.size = path, Counts(total), 0
        self._lock = Lock()
        self._answered = set[int]()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, f"{path.name} is no file")
        self._handle: int | None = handle

    def has(self, number: int) -> bool:
        """True if a line has an answer on the disk."""
        return number in self._answered

    def resume(self) -> None:
        """Find the answers of earlier runs. What is appended follows the last whole one. Raises OSError."""
        found, self.size = spans(self.path)
        self.counts = tally(found, self.counts.total)
        self._answered = set(found)

    def append(self, new: Entry) -> bool:
        """Add an answer, or nothing where that raises OSError, as on a full disk. False where its line has one already."""
        whole = b"%d %d %d,%d,%d,%d %s\n" % (new.number, new.outcome, *new.usage, new.text)
        with self._lock:
            if self._handle is None:
                raise OSError("the batch's file is closed")
            if self.has(new.number):
                return False
            os.ftruncate(self._handle, self.size)  # what an append left that failed
            left = memoryview(whole)
            while left:
                left = left[os.write(self._handle, left) :]
            self.size += len(whole)
            self._answered.add(new.number)
            self.counts = self.counts.plus(new.outcome == DONE, new.outcome == FAILED, new.usage)
        return True

    def close(self) -> None:
        """Close the file: later answers are not written."""
        with self._lock:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None


def spans(path: Path) -> tuple[dict[int, Span], int]:
    """Where the answer of each line lies in a file, by its number; and the bytes of its whole lines."""
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


def tally(spans: dict[int, Span], total: int) -> Counts:
    """The counts of a batch with these answers."""
    counts = Counts(total)
    for span in spans.values():
        counts = counts.plus(span.outcome == DONE, span.outcome == FAILED, span.usage)
    return counts


def write_sorted(source: Path, spans: dict[int, Span], outcomes: set[int], target: Path) -> int | None:
    """Write the answers with these outcomes into a new file, by the order of their lines; returns its bytes.

    None, and no file, where there are none. Raises OSError, without a trace.
    """
    found = [spans[number] for number in sorted(spans) if spans[number].outcome in outcomes]
    if not found:
        return None
    try:
        with source.open("rb") as answers, target.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            for span in found:
                out.writelines(_read(answers.fileno(), span))
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return sum(span.size for span in found)


def write_files(source: Path, total: int, output: Path, errors: Path) -> tuple[Counts, int | None, int | None]:
    """Write the output file and the error file of a batch. Raises OSError, and may leave the first of them."""
    found, _ = spans(source)
    sizes = write_sorted(source, found, {DONE}, output), write_sorted(source, found, {FAILED, LEFT}, errors)
    return tally(found, total), *sizes


def _read(handle: int, span: Span) -> Iterator[bytes]:
    place, end = span.offset, span.offset + span.size
    while place < end:
        piece = os.pread(handle, min(COPY_BYTES, end - place), place)
        if not piece:
            raise OSError(f"an answer is cut at {place}")
        yield piece
        place += len(piece)
