"""Servers of any make that a benchmark starts itself."""

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.server import Server, StartError, start_server, wait_first_token


@dataclass(frozen=True, slots=True)
class Running:
    """A server that has answered. `seconds`: from its command to its first token. `grpc`: host:port, where it has one."""

    name: str
    server: Server
    seconds: float
    grpc: str | None = None

    @property
    def url(self) -> str:
        """Of HTTP."""
        return self.server.address.http


def parse_command(text: str) -> tuple[str, list[str]]:
    """(name, words) of NAME=COMMAND. Raises ArgumentTypeError."""
    name, _, command = text.partition("=")
    if not name or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in the command")
    return name, shlex.split(command)


@contextlib.contextmanager
def answering(name: str, command: Sequence[str], log: Path) -> Iterator[Running]:
    """A server that has answered, as `loadtest.server.start_server` starts it. Raises StartError. In the main thread only."""
    print(f"starting {name}: {shlex.join(command)}; its log is {log}", file=sys.stderr, flush=True)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(start_server(command, stack.enter_context(log.open("wb"))))
            wait_first_token(server, log)
        except StartError as error:
            raise StartError(f"{name}: {error}") from None
        grpc = server.address.grpc if "{grpc}" in " ".join(command) else None
        yield Running(name, server, time.perf_counter() - began, grpc)
