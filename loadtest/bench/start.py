"""Seconds from the command to the first token of `attend serve`, and from Ctrl-C to its last process: attend bench start"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from loadtest.bench.figures import Figure, file, show
from loadtest.bench.shapes import FOLDER, SHAPES, write_shape
from loadtest.server import START_SECONDS, STOP_SECONDS, Address, StartError, free_port, wait_ready

MARK = "ATTEND_BENCH_START"
PAUSE = 0.05
IDLE_SECONDS = 1.0


def wait_first_token(port: int, process: subprocess.Popen, log: Path) -> None:
    """Ask for one token, again and again, until it comes. Raises StartError."""
    body, deadline = b'{"prompt":"a","max_tokens":1}', time.monotonic() + START_SECONDS
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5).read()
            return
        except OSError:  # nobody listens yet, or not ready: 503
            time.sleep(PAUSE)
    raise StartError(f"no token came; the end of {log}:\n{log.read_text(errors='replace')[-1000:]}")


def marked(mark: str) -> list[psutil.Process]:
    """Every living process whose environment holds the mark, whatever became of its parents."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and (process.info["environ"] or {}).get(MARK) == mark:
            found.append(process)
    return found


def start_and_stop(
    log: Path, flags: list[str], use: Callable[[Address, str], None] = lambda address, mark: None
) -> tuple[float, float]:
    """Both times of one server, which `use` may call before it is stopped, with its address and the mark of its processes.

    Raises StartError where it did not come up, or did not end.
    """
    port, mark = free_port(), secrets.token_hex(8)
    ports = ["--port", str(port), "--grpc-port", str(port + 100)]
    command = [sys.executable, "-m", "attend.service.commands.cli", "serve", *flags, *ports]
    started = time.perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=os.environ | {MARK: mark}, start_new_session=True)
    try:
        wait_first_token(port, process, log)
        first = time.perf_counter() - started
        wait_ready(process, log)
        time.sleep(IDLE_SECONDS)
        use(Address(f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 100}"), mark)
        stopped = time.perf_counter()
        process.send_signal(signal.SIGINT)
        while process.poll() is None or marked(mark):
            if time.perf_counter() - stopped > STOP_SECONDS:
                raise StartError(f"after {STOP_SECONDS:.0f} s these were left: {[each.name() for each in marked(mark)]}")
            time.sleep(PAUSE)
        return first, time.perf_counter() - stopped
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_SECONDS)


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="servers to start and stop (default 3)")
    parser.add_argument("--shape", choices=SHAPES, help="default: the shipped model")
    parser.add_argument("--json", type=Path, help="write the figures here too, with every value")
    options = parser.parse_args(words)
    FOLDER.mkdir(exist_ok=True)
    flags = [str(write_shape(options.shape))] if options.shape else []
    try:
        firsts, ends = zip(*(start_and_stop(FOLDER / "start.log", flags) for _ in range(options.turns)), strict=True)
    except StartError as error:
        sys.exit(str(error))
    figures = [Figure("the command to the first token", "s", firsts), Figure("Ctrl-C to the end of every process", "s", ends)]
    file(options.json, show(figures), figures, bench="start")


if __name__ == "__main__":
    main()
