"""The process of one model: what `--single` is, on sockets that only the server's process can reach.

Its words are the id of its parent, with which it ends, its folder, and its settings as JSON. It reports in a line of JSON on
standard output: what it serves, or why it cannot.
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from attend.model.errors import AttendError
from attend.service.runtime.single import main as serve
from attend.service.runtime.single import prepare
from attend.service.runtime.terminal_lines import set_line_style
from attend.service.settings import Settings

PR_SET_PDEATHSIG = 1
SOCKETS = ("http", "grpc")
"""The names of its sockets in its folder."""


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no report
    parent, folder, given = sys.argv[1:]
    _belong_to(int(parent))
    settings = Settings.from_json(given)
    set_line_style(settings.log_format)
    _name_log_lines(settings.name)

    def report(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=out, flush=True)

    try:
        prepare()
        from attend.service.runtime.http_server import Loop

        with _listening_at(Path(folder) / SOCKETS[0]) as http, asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(serve(settings, http, report))
    except AttendError as error:
        report({"error": str(error)})
        return 2


def _belong_to(parent: int) -> None:
    """End with the parent, and leave its terminal's Ctrl-C to it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)
    os.setpgid(0, 0)


def _listening_at(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    return made


def _name_log_lines(model: str) -> None:
    """Have each record tell its model: a field of JSON; a text line has it before the message."""
    make = logging.getLogRecordFactory()

    def make_record(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        record.model = model
        return record

    logging.setLogRecordFactory(make_record)


if __name__ == "__main__":
    sys.exit(main())
