"""Log lines as text for a person or as JSON for a collector. Prompts and answers are never logged."""

import json
import logging
import sys
import time

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

OWN = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
"""What every record has; the rest of a record's attributes came with `extra`."""


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
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        for name in sorted(vars(record).keys() - OWN):
            document.setdefault(name, getattr(record, name))
        return json.dumps(document, default=str)  # orjson refuses the lone surrogates of a file name that is not UTF-8


def configure(level: str, style: str, path: str = "") -> None:
    """Send the `attend` loggers to the end of a file, or, where that cannot be written, to standard error.

    A path such as /proc/1/fd/2 is another process's standard error.
    """
    handler, problem = _handler(path)
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(TEXT))
    root = logging.getLogger("attend")
    for old in root.handlers:
        old.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    if problem is not None:
        logging.getLogger("attend.logs").warning("log lines go to standard error: %s", problem)


def _handler(path: str) -> tuple[logging.Handler, OSError | None]:
    """What writes, and why it is not the file."""
    problem = None
    if path:
        try:
            return logging.FileHandler(path, encoding="utf-8", errors="backslashreplace"), None
        except OSError as error:
            problem = error
    # Serve puts a logger in the place of a replica's sys.stderr, which drops what is below its own level.
    return logging.StreamHandler(sys.__stderr__), problem
