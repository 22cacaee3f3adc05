"""The whole product on arm64, in an emulator: what `attend` says and streams there is what it says on this machine."""

import json
import os
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.release.arm64 import CPUS, inside, provide
from tests.service.server import Server, running
from tests.service.sse import events_of

FOLDER = os.environ.get("ATTEND_TEST_ARM64", "")
if not FOLDER:
    pytest.skip("no folder for arm64 is given: make test-arm64", allow_module_level=True)
pytestmark = pytest.mark.timeout(3600)  # the first test builds
ASKED = {"prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0}
GENERATE = ("generate", ASKED["prompt"], "--max-tokens", "48", "--json", "--logprobs", "0")


@pytest.fixture(scope="module")
def root() -> Path:
    return provide(Path(FOLDER))


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    script = folder / "attend"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(inside(root, "attend"))} "$@"\n')
    script.chmod(0o755)
    with running(folder / "log", "--single", script=script) as server:
        yield server


def answer(*command: str, **variables: str) -> Any:
    """The JSON that a command prints."""
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False, env=os.environ | variables).stdout)


@pytest.fixture(scope="module")
def wanted() -> Any:
    """What this machine's own processor makes of the prompt."""
    return answer(sys.executable, "-m", "attend.service.commands.cli", *GENERATE)["choices"][0]


def test_every_package_that_a_package_asks_for_is_there(root):
    """The name of NVIDIA's cusparselt wheel has another platform than the wheel."""
    done = subprocess.run(inside(root, "python", "-m", "pip", "check"), check=False, capture_output=True, text=True)
    assert {line for line in done.stdout.splitlines() if "cusparselt" not in line} <= {"No broken requirements found."}


@pytest.mark.parametrize("cpu", CPUS)
def test_generate_has_the_tokens_of_this_machine(root, wanted, cpu):
    found = answer(*inside(root, "attend", *GENERATE), QEMU_CPU=cpu, ATTEND_BACKEND="native")["choices"][0]
    assert found["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(wanted["logprobs"]["token_logprobs"], abs=0.05)


def test_doctor_names_the_processor_and_the_decoder(root):
    """It has a minute, too little for an emulator to measure speed."""
    checks = {check["name"]: check for check in answer(*inside(root, "attend", "doctor", "--json"))["checks"]}
    assert checks["processor"]["detail"].startswith("aarch64 with I8MM, BF16, DOTPROD; ")
    assert checks["native library"]["detail"] == "built, its best variant here: neon-i8mm-bf16"
    assert checks["backend"]["detail"] == "bfloat16 by the native-neon-i8mm-bf16 backend"
    assert {name for name, check in checks.items() if check["outcome"] == "failed"} <= {"device speed", "model speed"}


def test_http_streams_the_text_of_this_machine(server, wanted):
    body = json.dumps({**ASKED, "stream": True}).encode()
    call = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=200) as streamed:
        assert "".join(event["choices"][0]["text"] for event in events_of(streamed.read().decode())) == wanted["text"]


def test_grpc_streams_the_text_of_this_machine(server, wanted):
    request = pb.GenerateRequest(text=ASKED["prompt"], max_tokens=48, temperature=0)
    with grpc.insecure_channel(server.target) as channel:
        streamed = [
            message.outputs[0].text for message in rpc.GenerationServiceStub(channel).GenerateStream(request, timeout=200)
        ]
    assert len(streamed) > 1 and "".join(streamed) == wanted["text"]


def test_sigterm_ends_the_server(server):
    server.stop()
    assert server.process.returncode == 0
