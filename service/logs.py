"""Log lines as text for a person or as JSON for a collector. Prompts and answers are never logged."""

import json
import logging
import sys
import time

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)  # orjson refuses the lone surrogates of a file name that is not UTF-8


def configure(level: str, style: str) -> None:
    """Send the `attend` loggers to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(TEXT))
    root = logging.getLogger("attend")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
