"""Other people's load generators, where ATTEND_TEST_GUIDELLM and ATTEND_TEST_AIPERF name their commands."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.narrow import MODEL
from tests.service.server import Server

COMMANDS = {name: os.environ.get(f"ATTEND_TEST_{name.upper()}", "") for name in ("guidellm", "aiperf")}
TOKENIZER = str(Path(__file__).parents[2] / "attend" / "model" / "default")
REQUESTS, PROMPT, OUTPUT = 6, 32, 8
pytestmark = [pytest.mark.ray, pytest.mark.clients, pytest.mark.timeout(900)]


def run(server: Server, name: str, *arguments: str) -> None:
    """Run one of them, which must end well, and have no request refused."""
    if not COMMANDS[name]:
        pytest.skip(f"ATTEND_TEST_{name.upper()} names no {name}")
    before = len(server.output().splitlines())
    # aiperf takes no folder for a tokenizer where a hub is forbidden; there is none to reach here.
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    command = [COMMANDS[name], *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    asked = [line for line in server.output().splitlines()[before:] if "attend.requests: http /v1/" in line]
    assert len(asked) >= REQUESTS and all(f"{OUTPUT} tokens" in line and "status 200" in line for line in asked), asked


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_every_request(server: Server, tmp_path: Path, path: str) -> None:
    arguments = ["--backend", f"kind=openai_http,target={server.url},request_format={path}"]
    arguments += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    arguments += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--seed", "kind=static,value=1"]
    arguments += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"]
    arguments += ["--output", f"kind=json,path={tmp_path}/found.json", "--disable-progress"]
    run(server, "guidellm", "run", *arguments)
    (benchmark,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == REQUESTS and not metrics["request_totals"]["errored"]
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf_measures_every_request(server: Server, tmp_path: Path, kind: str) -> None:
    arguments = ["--model", MODEL, "--url", server.url, "--endpoint-type", kind, "--streaming", "--tokenizer", TOKENIZER]
    arguments += ["--isl", str(PROMPT), "--osl", str(OUTPUT), "--concurrency", "2", "--request-count", str(REQUESTS)]
    arguments += ["--random-seed", "1", "--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    run(server, "aiperf", "profile", *arguments, "--artifact-dir", str(tmp_path), "--ui", "none")
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["output_sequence_length"]["avg"] == OUTPUT and found["time_to_first_token"]["avg"] > 0
