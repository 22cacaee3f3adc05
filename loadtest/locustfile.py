"""Streams from Attend under load, over HTTP (server-sent events) and over gRPC. How to run and read it: README.md."""

import sys
from typing import Any

import grpc.experimental.gevent  # type: ignore[import-not-found]

grpc.experimental.gevent.init_gevent()  # before any channel exists, or a blocking call stops every user

import locust.runners  # noqa: E402 - the line above must come first
import locust.stats  # noqa: E402
from locust import events  # noqa: E402
from locust.runners import WorkerRunner  # noqa: E402

from loadtest.options import add_options, mistakes, objectives  # noqa: E402
from loadtest.report import Recorder, write  # noqa: E402
from loadtest.shapes import use_shape  # noqa: E402
from loadtest.slo import MISSED  # noqa: E402
from loadtest.stream import three_digits  # noqa: E402
from loadtest.users import GrpcStreamUser, HttpChatUser, HttpStreamUser  # noqa: E402

__all__ = ["GrpcStreamUser", "HttpChatUser", "HttpStreamUser"]

locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # its keys are whole milliseconds
locust.runners.WORKER_REPORT_INTERVAL = 1.0  # seconds; locust's own 3 would blur the phases of the record
recorder = Recorder()
events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener  # type: ignore[untyped-decorator]
def begin(environment: Any, **_: Any) -> None:
    """The shape and the record, in the process that sees the whole: a worker sees its own share only."""
    options = environment.parsed_options
    if not options.user_classes:
        HttpChatUser.weight = 0  # only where it is named: not every model chats
    wrong = mistakes(options)
    if wrong:
        sys.exit(f"locustfile: {wrong}")
    if isinstance(environment.runner, WorkerRunner):
        return
    if options.shape != "flat":
        use_shape(environment, options.shape)
    recorder.start(environment)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def judge(environment: Any, **_: Any) -> None:
    """The report and the exit code, when the run is over."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options = environment.parsed_options
    rows = recorder.stop()
    missed = list(objectives(options).missed_objectives(rows))
    for sentence in missed:
        print(f"SLO: {sentence}")
    if options.report:
        write(options, recorder.phases(), rows, missed)
    environment.process_exit_code = MISSED if missed else 0
