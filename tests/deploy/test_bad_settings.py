"""What a pod says when it cannot start: the last line of its container's log, which Kubernetes makes its termination message.

`attend inspect` is the RayService's init container, `attend serve` is the standalone pod.
"""

import os
import socket
import subprocess
import sys

import pytest

from attend.service.settings import PREFIX
from tests.service.server import free_port, free_ports

MESSAGE_BYTES = 2048
"""Of the log's end, what FallbackToLogsOnError keeps."""


def last_line(verb, **variables):
    """Status, and last line, of a container with these variables, and else with free ports."""
    http, grpc = map(str, free_ports(2))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    environment |= {"ATTEND_PORT": http, "ATTEND_GRPC_PORT": grpc} | variables
    command = [sys.executable, "-m", "attend.service.commands.cli", verb]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert len(done.stdout.encode()) <= MESSAGE_BYTES and "Traceback" not in done.stdout
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("verb", ["inspect", "serve"])
@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("ATTEND_DEVICE", "tpu", "attend: ATTEND_DEVICE = 'tpu' cannot be used: input should be 'auto', 'cpu' or 'cuda'"),
        ("ATTEND_PORT", "tcp://10.0.0.1:8000", "attend: ATTEND_PORT = 'tcp://10.0.0.1:8000' cannot be used: "),
        ("ATTEND_MODEL", "/weights", "attend: /weights"),
        ("ATTEND_OTEL_ENDPOINT", "collector:4318", "attend: otel_endpoint must begin with http:// or https://"),
    ],
)
def test_a_wrong_setting_ends_the_container_with_one_sentence(verb, variable, value, sentence):
    status, line = last_line(verb, **{variable: value})
    assert status == 2
    assert line.startswith(sentence), line


def test_a_missing_file_of_keys_ends_the_standalone_pod_with_its_path(tmp_path):
    status, line = last_line("serve", ATTEND_API_KEYS_FILE=str(tmp_path / "keys"))
    assert status == 2
    assert line.startswith("attend: ") and str(tmp_path / "keys") in line


@pytest.mark.parametrize("name", ["port", "grpc_port"])
def test_a_port_that_is_taken_ends_the_container_with_its_number_in_the_last_line(name):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = last_line("serve", **{PREFIX + name.upper(): str(port)})
    assert (status, line) == (2, f"attend: {name} {port} is taken: another process listens on it; choose another {name}")


def test_one_port_for_both_transports_ends_the_container():
    port = free_port()
    status, line = last_line("serve", ATTEND_PORT=str(port), ATTEND_GRPC_PORT=str(port))
    assert (status, line) == (2, f"attend: port and grpc_port are both {port}: they must differ")
