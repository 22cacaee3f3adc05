"""Streams from Attend under load, over HTTP (server-sent events) and over gRPC. How to run and read it: README.md."""

from typing import Any

import grpc.experimental.gevent  # type: ignore[import-not-found]

grpc.experimental.gevent.init_gevent()  # before any channel exists, or a blocking call stops every user

import locust.stats  # noqa: E402 - the line above must come first
from locust import events  # noqa: E402
from locust.runners import WorkerRunner  # noqa: E402

from loadtest.measures import MISSED, read  # noqa: E402
from loadtest.options import add_options, objectives  # noqa: E402
from loadtest.report import write  # noqa: E402
from loadtest.stream import three_digits  # noqa: E402
from loadtest.users import GrpcStreamUser, HttpStreamUser  # noqa: E402

__all__ = ["GrpcStreamUser", "HttpStreamUser"]

locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # its keys are whole milliseconds
events.init_command_line_parser.add_listener(add_options)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def judge(environment: Any, **_: Any) -> None:
    """The report and the exit code, in the process that sees the whole: a worker sees its own share only."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options = environment.parsed_options
    rows = read(environment.stats.entries.values())
    missed = list(objectives(options).missed_objectives(rows))
    for sentence in missed:
        print(f"SLO: {sentence}")
    if options.report:
        write(options, rows, missed)
    environment.process_exit_code = MISSED if missed else 0
