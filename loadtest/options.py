"""The command line beside locust's own: `python -m loadtest.load --help` shows it."""

import argparse
import os
import secrets

from loadtest.stream import PROMPTS

API_KEY = "ATTEND_API_KEY"
"""The variable that holds the key for a service that asks for one: a command line can be read by everybody."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the load, the objectives and the report to the parser."""
    load = parser.add_argument_group("Attend: the load")
    load.add_argument("--grpc-host", default="127.0.0.1:9000", help="gRPC address, host:port; --host is the HTTP address")
    load.add_argument("--grpc-tls", action="store_true", help="the gRPC address speaks TLS; for HTTP https:// says so")
    load.add_argument("--ca-file", default="", help="PEM file of who signs the certificates; default: whom the system trusts")
    load.add_argument("--prompts", choices=list(PROMPTS), default="mixed", help="kinds of prompts: one of them, or all")
    load.add_argument("--long-chars", type=int, default=1400, help="characters of a long or shared prompt")
    load.add_argument("--max-tokens", type=int, default=64, help="tokens per answer; the end-of-text token is ignored")
    load.add_argument("--deadline-s", type=float, default=60.0, help="a request that takes longer has failed")
    about = "closed: each user waits for its answer; open: each user is --source-rate arrivals a second, waiting for nothing"
    load.add_argument("--loop", choices=["closed", "open"], default="closed", help=about)
    load.add_argument("--source-rate", type=float, default=1.0, help="requests a second of one user in the open loop")
    add_seed(load)
    slo = parser.add_argument_group("Attend: objectives; the exit code is 3 when one is missed")
    slo.add_argument("--max-ttft-p95-ms", type=float, default=None, help="time to the first token, of each transport")
    slo.add_argument("--max-itl-p95-ms", type=float, default=None, help="time between two messages, of each transport")
    slo.add_argument("--max-fail-ratio", type=float, default=0.0, help="failed requests of all requests")
    slo.add_argument("--max-refused-ratio", type=float, default=0.0, help="refused requests of all requests")
    slo.add_argument("--report", default="", help="folder that gets summary.json")


def add_seed(parser: argparse._ActionsContainer) -> None:
    """Add --seed. Where it is not given, each run draws another: no server has the prompts of that one in its prefix cache."""
    about = "of prompts and arrivals; a server that was asked with it before has the prompts in its cache; default: drawn anew"
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help=about)


def api_key() -> str:
    """The caller's key; empty where the service asks for none."""
    return os.environ.get(API_KEY, "")
