"""Log lines as text for a person or as JSON for a collector. Prompts and answers are never logged.

Callers do not wait for a line to be written: they put it into a bounded queue, from which a thread writes. So a pipe that is
not read loses lines, which are counted, and never holds the event loop.
"""

import copy
import json
import logging
import os
import select
import threading
import time
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

from attend.model.errors import SettingError
from attend.service.observe.tracing import CallFacts

requests = logging.getLogger("attend.requests")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
STANDARD_ERROR = 2
MAX_LINES = 4096
"""Lines that may wait to be written."""
GATHER_SECONDS = 0.05
"""How long lines that follow another are gathered: each time the writing thread wakes, it takes the interpreter from calls."""
CLOSE_SECONDS = 2.0
"""How long the end of a process waits for lines to be written."""

OWN = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
"""What every record has; the rest of a record's attributes came with `extra`."""


_dropped = 0
_lock = threading.Lock()


def lines_dropped() -> int:
    """Lines that this process did not write, because they were not read in time or the file could not be written."""
    return _dropped


def _drop() -> None:
    global _dropped
    with _lock:
        _dropped += 1


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields of `extra`, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            document["exception"] = record.exc_text
        for name in sorted(vars(record).keys() - OWN):
            document.setdefault(name, getattr(record, name))
        return json.dumps(document, default=str)  # orjson refuses the lone surrogates of a file name that is not UTF-8


class TextFormatter(logging.Formatter):
    """A line for a person, with the time in UTC as JSON has it."""

    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__(TEXT)
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """With the model, where several are served: its process sets it (`runtime/models/child.py`)."""
        line = super().formatMessage(record)
        model = getattr(record, "model", None)
        return line if model is None else line.replace(f"{record.name}: ", f"{record.name} [{model}]: ", 1)


class LineQueue(QueueHandler):
    """Puts records into a bounded queue, from which a thread writes them as lines. A full queue drops them, counted."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        lines: Queue[logging.LogRecord | None] = Queue(MAX_LINES)
        super().__init__(lines)
        self.writer = LineWriter(lines, descriptor, formatter)
        self._open = True
        self.writer.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record, to be formatted by the thread. A traceback is made text here: its frames hold what the caller held."""
        if record.exc_info:
            text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record = copy.copy(record)
            record.exc_info, record.exc_text = None, text
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record without waiting; where the queue is full, count it as dropped."""
        try:
            self.queue.put_nowait(record)
        except Full:
            _drop()

    def close(self) -> None:
        """Write the waiting lines, for CLOSE_SECONDS at most."""
        super().close()
        if self._open:
            self._open = False
            self.writer.stop()


class LineWriter(QueueListener):
    """The thread that writes. It alone waits for a slow reader; when it has caught up, it logs how many lines were dropped."""

    def __init__(self, lines: "Queue[logging.LogRecord | None]", descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__(lines)
        self._lines = lines
        self.descriptor = descriptor
        self._formatter = formatter
        self._told = lines_dropped()

    def dequeue(self, block: bool) -> logging.LogRecord:
        """The next record. After one that had to be waited for, others gather first."""
        waited = self._lines.empty()
        record = super().dequeue(block)
        if waited and record is not None:
            time.sleep(GATHER_SECONDS)
        return record

    def handle(self, record: logging.LogRecord) -> None:
        """Write one line. A logging handler would hold a lock meanwhile, for which the end of the process would wait."""
        try:
            self._write(record)
            dropped = lines_dropped()
            if dropped > self._told and self._lines.empty():
                self._write(_notice(dropped - self._told))
                self._told = dropped
        except Exception:  # a full disk, or a record that does not format: the thread must live on
            _drop()

    def stop(self) -> None:
        """Write the waiting lines, then end; for CLOSE_SECONDS at most. No thread may begin at the end of a process."""
        deadline = time.monotonic() + CLOSE_SECONDS
        assert self._thread is not None
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive() and self.descriptor != STANDARD_ERROR:
            os.close(self.descriptor)

    def _write(self, record: logging.LogRecord) -> None:
        left = f"{self._formatter.format(record)}\n".encode("utf-8", "backslashreplace")
        while left:
            try:
                left = left[os.write(self.descriptor, left) :]
            except BlockingIOError:  # standard error is shared, and another process made it non-blocking
                waits = select.poll()
                waits.register(self.descriptor, select.POLLOUT)
                waits.poll()


def _notice(dropped: int) -> logging.LogRecord:
    told = f"{dropped} log lines were dropped: they could not be written in time"
    return logging.makeLogRecord({"name": "attend.logs", "levelno": logging.WARNING, "levelname": "WARNING", "msg": told})


def close() -> None:
    """Write the waiting lines, for CLOSE_SECONDS at most; later lines are not written."""
    for handler in logging.getLogger("attend").handlers:
        handler.close()


def configure(level: str, style: str, path: str = "") -> None:
    """Send the `attend` loggers, and what fails of traces, to the end of a file (also /proc/1/fd/2), or to standard error."""
    descriptor, problem = _open_log_file(path)
    root = logging.getLogger("attend")
    close()
    root.handlers[:] = [LineQueue(descriptor, JsonFormatter() if style == "json" else TextFormatter())]
    root.setLevel(level.upper())
    root.propagate = False
    traces = logging.getLogger("opentelemetry")  # which else writes to standard error
    traces.handlers[:], traces.propagate = root.handlers, False
    traces.setLevel("ERROR")  # not each of an exporter's tries
    if problem is not None:
        logging.getLogger("attend.logs").warning("log lines go to standard error: %s", problem)


def check_log_file(path: str) -> None:
    """Raise SettingError where a file for log lines cannot be written."""
    descriptor, problem = _open_log_file(path)
    if problem is not None:
        raise SettingError(f"log_file {path!r} cannot be written: {problem.strerror}")
    if path:
        os.close(descriptor)


def _open_log_file(path: str) -> tuple[int, OSError | None]:
    """The descriptor to write to, and why it is not the file."""
    if not path:
        return STANDARD_ERROR, None
    try:
        # To open a named pipe that has no reader would wait for one.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        return STANDARD_ERROR, error
    os.set_blocking(descriptor, True)
    return descriptor, None


def log_call(facts: CallFacts, trace_id: str | None) -> None:
    """One line for a call that has ended; as JSON, its numbers are fields."""
    caller = facts.caller
    key = None if caller.key is None else caller.key.name
    fields: dict[str, object] = {
        **{name: getattr(facts, name) for name in ("request_id", "transport", "route", "outcome")},
        "prompt_tokens": facts.prompt_tokens,
        "generation_tokens": facts.generation_tokens,
        "seconds": round(facts.seconds, 6),
        "first_token_seconds": None if facts.first_token is None else round(facts.first_token, 6),
        **{"status": facts.status, "error": facts.error, "key": key, "tenant": caller.tenant},
        **{"client": caller.address, "forwarded_for": caller.forwarded_for},
        **({} if trace_id is None else {"trace_id": trace_id}),
    }
    line = "%s %s %s: %s, %d prompt tokens, %d tokens, %.3f s, status %s%s%s%s%s%s"
    where = (facts.transport, facts.route, facts.request_id, facts.outcome)
    who = {"error": facts.error, "key": key, "tenant": caller.tenant, "from": caller.address, "for": caller.forwarded_for}
    told = (
        "" if value is None else f", {name} {value if value.isprintable() else ascii(value)}" for name, value in who.items()
    )
    requests.info(line, *where, facts.prompt_tokens, facts.generation_tokens, facts.seconds, facts.status, *told, extra=fields)
