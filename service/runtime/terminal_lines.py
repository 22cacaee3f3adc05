"""Lines on standard error for the person who typed a command: as text, or as JSON beside a server's log lines."""

import logging
import sys

LOGGER = "attend.server"
_style = "text"


def set_line_style(style: str) -> None:
    """From now on lines are written as `text`, or as `json`."""
    global _style
    _style = style


def print_line(text: str, level: int = logging.INFO) -> None:
    """Write a line. As JSON, each line of a text is an object of its own, with the level of a log line."""
    if _style == "json":
        from attend.service.observe.logs import JsonFormatter

        records = [logging.LogRecord(LOGGER, level, "", 0, line, None, None) for line in text.split("\n")]
        text = "\n".join(map(JsonFormatter().format, records))
    print(text, file=sys.stderr, flush=True)
