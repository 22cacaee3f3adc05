"""Streams from Attend under load, over HTTP (server-sent events) and over gRPC. How to run and read it: README.md."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.experimental.gevent  # type: ignore[import-not-found]

grpc.experimental.gevent.init_gevent()  # before any channel exists, or a blocking call stops every user

import locust.stats  # noqa: E402 - the line above must come first
from locust import events  # noqa: E402
from locust.runners import WorkerRunner  # noqa: E402

from loadtest.measures import MISSED, PERCENTILES, Objectives, Row, Rows, read, total, used_transports  # noqa: E402
from loadtest.options import add_options  # noqa: E402
from loadtest.provenance import identity, provenance  # noqa: E402
from loadtest.stream import ITL, REFUSED, TOTAL, TPOT, TTFT, three_digits  # noqa: E402
from loadtest.users import GrpcStreamUser, HttpStreamUser  # noqa: E402

__all__ = ["GrpcStreamUser", "HttpStreamUser"]

LOAD = ("loop", "prompts", "long_chars", "max_tokens", "source_rate", "num_users")
"""Options that a summary repeats."""

locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # its keys are whole milliseconds
events.init_command_line_parser.add_listener(add_options)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def judge(environment: Any, **_: Any) -> None:
    """The report and the exit code, in the process that sees the whole: a worker sees its own share only."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options = environment.parsed_options
    rows = read(environment.stats.entries.values())
    limits = options.max_ttft_p95_ms, options.max_itl_p95_ms, options.max_fail_ratio, options.max_refused_ratio
    missed = list(Objectives(*limits).missed_objectives(rows))
    for sentence in missed:
        print(f"SLO: {sentence}")
    if options.report:
        write(options, rows, missed)
    environment.process_exit_code = MISSED if missed else 0


def write(options: argparse.Namespace, rows: Rows, misses: Sequence[str]) -> None:
    """Write summary.json into the folder that was asked for; times in milliseconds."""
    folder = Path(options.report)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "provenance": provenance(options.seed, {"HTTP": identity(options.host, options.ca_file)} if options.host else {}),
        "load": {name: getattr(options, name) for name in LOAD},
        "missed": list(misses),
        "failed": total(rows, TOTAL).failures,
        "answers": total(rows, TOTAL).count,
        "refused": total(rows, REFUSED).count,
        "transports": {
            transport: {
                measure: {"count": row.count} | {f"p{percent}": row.percentile(percent) for percent in PERCENTILES}
                for measure in (TTFT, ITL, TPOT, TOTAL)
                for row in [rows.get((measure, transport), Row())]
            }
            for transport in used_transports(rows)
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
