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
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATTEND_")}
    environment |= {"ATTEND_PORT": http, "ATTEND_GRPC_PORT": grpc} | variables
    command = [sys.executable, "-m", "attend.service.commands.cli", verb]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert len(done.stdout) < MESSAGE_BYTES, "the message would be cut"
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


def test_a_taken_port_ends_the_standalone_pod_with_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = last_line("serve", ATTEND_PORT=str(port))
    assert (status, line) == (2, f"attend: port {port} is taken: another process listens on it; choose another port")


def test_a_missing_key_file_ends_the_standalone_pod_with_one_sentence(tmp_path):
    status, line = last_line("serve", ATTEND_API_KEYS_FILE=str(tmp_path / "keys"))
    assert status == 2
    assert line.startswith("attend: ") and str(tmp_path / "keys") in line


# --- what `kubectl describe pod` shows of a container that ends


def ended(**variables):
    """(status, last line) of what the image runs, with these settings, standard error and output in one as in a log."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment |= {PREFIX + name.upper(): str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "attend.service.commands.cli", "serve"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stdout
    assert len(done.stdout.encode()) <= MESSAGE_BYTES
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("port", "tcp://10.0.0.1:80", "input should be a valid integer"),
        ("grpc_port", "70000", "input should be less than or equal to 65535"),
        ("device", "gpu", "input should be 'auto', 'cpu' or 'cuda'"),
        ("kv_cache_memory", "512Mo", "it must be a number of bytes, as 536870912, 512MiB or 2GB"),
        ("prefix_caching", "maybe", "input should be a valid boolean"),
    ],
)
def test_a_wrong_setting_ends_the_container_with_status_two_and_its_name_in_the_last_line(name, value, why):
    status, last = ended(**{name: value})
    assert status == 2
    assert last.startswith(f"attend: {PREFIX}{name.upper()} = {value!r} cannot be used: {why}")


def test_a_missing_file_of_keys_ends_the_container_with_the_path_in_the_last_line(tmp_path):
    missing = tmp_path / "keys/attend.keys"
    port, grpc_port = free_ports(2)
    status, last = ended(api_keys_file=missing, port=port, grpc_port=grpc_port)
    assert status == 2
    assert last.startswith("attend: ")
    assert str(missing) in last


def test_a_missing_checkpoint_ends_the_container_with_the_path_in_the_last_line(tmp_path):
    port, grpc_port = free_ports(2)
    status, last = ended(model=tmp_path / "weights", port=port, grpc_port=grpc_port)
    assert status == 2
    assert last.startswith("attend: ")
    assert str(tmp_path / "weights") in last


@pytest.mark.parametrize("name", ["port", "grpc_port"])
def test_a_port_that_is_taken_ends_the_container_with_its_number_in_the_last_line(name):
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        taken = other.getsockname()[1]
        port, grpc_port = free_ports(2)
        status, last = ended(**{"port": port, "grpc_port": grpc_port, name: taken})
    assert (status, last) == (2, f"attend: {name} {taken} is taken: another process listens on it; choose another {name}")


def test_one_port_for_both_transports_ends_the_container():
    port = free_port()
    assert ended(port=port, grpc_port=port) == (2, f"attend: port and grpc_port are both {port}: they must differ")
