"""The command line beside locust's own: `python -m loadtest.load --help` shows it."""

import argparse
import os
import secrets
from pathlib import Path

from loadtest.lengths import lengths
from loadtest.profiles import PROFILES
from loadtest.prompts import MIXES
from loadtest.slo import Objectives
from loadtest.traces import SHIPPED

API_KEY = "ATTEND_API_KEY"
"""The variable that holds the key for a service that asks for one: a command line can be read by everybody."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the load, its shape, the objectives and the report to the parser."""
    load = parser.add_argument_group("Attend: the load")
    load.add_argument("--grpc-host", default="127.0.0.1:9000", help="gRPC address, host:port; --host is the HTTP address")
    load.add_argument(
        "--grpc-tls", action="store_true", help="the gRPC address speaks TLS; for HTTP an https:// address says so"
    )
    load.add_argument("--ca-file", default="", help="PEM file of who signs the certificates; default: whom the system trusts")
    load.add_argument("--prompts", choices=list(MIXES), default="mixed", help="kinds of prompts: one of them, or all")
    load.add_argument("--long-chars", type=int, default=1400, help="characters of a long or shared prompt")
    load.add_argument("--max-tokens", type=int, default=64, help="tokens per answer; the end-of-text token is ignored")
    load.add_argument(
        "--prompt-tokens",
        type=lengths,
        default=None,
        help="lengths of prompts in tokens: a number, uniform:LEAST:MOST, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA; "
        "prompts are token ids then; of a chat: the length of each message",
    )
    load.add_argument("--output-tokens", type=lengths, default=None, help="the same of answers, in place of --max-tokens")
    load.add_argument("--prefixes", type=positive, default=1, help="shared prefixes; the n-th is n times rarer than the first")
    load.add_argument("--turns", type=positive, default=4, help="turns of a chat; each has all that was said before")
    load.add_argument(
        "--models", type=names, default=(), help="models or LoRA adapters, comma-separated: each request draws one"
    )
    load.add_argument("--tools", type=share, default=0.0, help="share of chats that bring a tool, 0 to 1")
    load.add_argument("--trace", type=trace, default=None, help=f"file of calls for --loop trace; shipped: {SHIPPED.name}")
    load.add_argument("--trace-speed", type=float, default=1.0, help="so many times faster than the calls of the trace came")
    load.add_argument("--trace-scale", type=float, default=1.0, help="factor on the lengths of its prompts and answers")
    load.add_argument("--deadline-s", type=float, default=60.0, help="a request that takes longer has failed")
    load.add_argument(
        "--loop",
        choices=["closed", "open", "trace"],
        default="closed",
        help="closed: each user waits for its answer; open: each user is --source-rate arrivals a second, waiting for nothing; "
        "trace: the users share out the calls of --trace, each at its time",
    )
    load.add_argument("--source-rate", type=float, default=1.0, help="requests a second of one user in the open loop")
    load.add_argument(
        "--shape", choices=["flat", *PROFILES], default="flat", help="how the load reaches --users within --run-time"
    )
    add_seed(load)
    slo = parser.add_argument_group("Attend: objectives; the exit code is 3 when one is missed")
    slo.add_argument("--max-ttft-p95-ms", type=float, default=None, help="time to the first token, of each transport")
    slo.add_argument("--max-itl-p95-ms", type=float, default=None, help="time between two messages, of each transport")
    slo.add_argument("--max-fail-ratio", type=float, default=0.0, help="failed requests of all requests")
    slo.add_argument("--max-refused-ratio", type=float, default=0.0, help="refused requests of all requests")
    report = parser.add_argument_group("Attend: the report")
    report.add_argument("--report", default="", help="folder that gets curve.html (latency against load) and summary.json")


def positive(text: str) -> int:
    """A number from 1 on. Raises argparse.ArgumentTypeError, as those below do."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def trace(text: str) -> Path:
    """A file of calls: its path, or the name of the shipped one."""
    path = next((path for path in (Path(text), SHIPPED.parent / text) if path.is_file()), None)
    if path is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no file")
    return path


def mistakes(options: argparse.Namespace) -> str:
    """What does not go together, in a sentence; empty where all does."""
    if options.loop != "trace":
        return "--trace needs --loop trace" if options.trace else ""
    if not options.trace:
        return "--loop trace needs --trace FILE"
    if options.trace_speed <= 0 or options.trace_scale <= 0:
        return "--trace-speed and --trace-scale must be above 0"
    if options.processes not in (None, 1) or options.master or options.worker:
        return "--loop trace runs in one process: without --processes, --master and --worker"
    if "HttpChatUser" in options.user_classes:
        return "a trace has token ids, which no chat takes: name HttpStreamUser or GrpcStreamUser"
    return ""


def add_seed(parser: argparse._ActionsContainer) -> None:
    """Add --seed. Where it is not given, each run draws another: no server has the prompts of that one in its prefix cache."""
    about = "of prompts and arrivals; a server that was asked with it before has the prompts in its cache; default: drawn anew"
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help=about)


def api_key() -> str:
    """The caller's key; empty where the service asks for none."""
    return os.environ.get(API_KEY, "")


def root_certificates(options: argparse.Namespace) -> bytes | None:
    """The certificates of --ca-file for gRPC; None is whom gRPC trusts by itself."""
    return Path(options.ca_file).read_bytes() if options.ca_file else None


def objectives(options: argparse.Namespace) -> Objectives:
    """The objectives of a command line."""
    return Objectives(options.max_ttft_p95_ms, options.max_itl_p95_ms, options.max_fail_ratio, options.max_refused_ratio)
