"""What a caller and an operator see of a real server: Ray Serve, the fast data plane, the default model."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import grpc
import openai
import pytest
from safetensors.torch import load_file, save_file

from model.config import DEFAULT_MODEL as DEFAULT
from protos.attend.v1 import generation_pb2 as pb
from protos.attend.v1 import generation_pb2_grpc as rpc
from tests.service.server import START_SECONDS, Server, free_port, free_ports, running, started, wait_for

pytestmark = pytest.mark.ray

SLOWNESS = float(os.environ.get("ATTEND_TEST_SLOWNESS", "1.5"))
"""How much slower than the reference machine a busy one may be."""

PROMPT = "def fibonacci(n):"
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0.7, "seed": 1}
SLOW = ("--dtype", "float32", "--num-threads", "1")
"""Of a server whose long streams outlive what is done to it."""


def post(server: Server, **body: object) -> Iterator[bytes]:
    """The lines of the answer to POST /v1/completions."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        yield from answer


def complete(server: Server, prompt: str, **fields: object) -> str:
    """The text of a greedy answer."""
    (line,) = post(server, prompt=prompt, temperature=0, **fields)
    return json.loads(line)["choices"][0]["text"]


def stub(server: Server) -> rpc.GenerationServiceStub:
    return rpc.GenerationServiceStub(grpc.insecure_channel(server.target))


def idle(server: Server) -> bool:
    """Whether no request runs or waits and every KV block is free."""
    names = ("attend_requests_running", "attend_requests_waiting", "attend_kv_cache_usage")
    return all(server.metric(name) == 0 for name in names)


def test_early_callers_are_told_to_come_again_and_an_idle_server_stops_in_six_seconds(tmp_path: Path) -> None:
    answers: set[tuple[int, str | None, str]] = set()
    codes: set[tuple[grpc.StatusCode, bool]] = set()

    def ready(server: Server) -> bool:
        try:
            complete(server, PROMPT, max_tokens=1)
            answers.add((200, None, ""))
        except urllib.error.HTTPError as refusal:
            answers.add((refusal.code, refusal.headers["retry-after"], json.load(refusal)["error"]["code"]))
        except (urllib.error.URLError, ConnectionError, HTTPException):  # nobody listens yet
            return False
        try:
            stub(server).Generate(pb.GenerateRequest(text=PROMPT, max_tokens=1), timeout=60)
        except grpc.RpcError as refusal:
            codes.add((refusal.code(), "no replica can take" in (refusal.details() or "")))
        return "Ready:" in server.output()

    with started(tmp_path / "log") as server:
        assert wait_for(lambda: ready(server), START_SECONDS)
        ready(server)
        assert server.stop(signal.SIGINT) < 6 * SLOWNESS
        assert server.processes() == []
    assert answers == {(503, "1", "unavailable"), (200, None, "")}
    assert {code for code, _ in codes} == {grpc.StatusCode.UNAVAILABLE}
    assert any(ours for _, ours in codes)


def test_both_transports_give_the_same_greedy_text(server: Server) -> None:
    streamed = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in post(server, prompt=PROMPT, temperature=0, max_tokens=24, stream=True)
        if line.startswith(b"data: {")
    )
    request = pb.GenerateRequest(text=PROMPT, temperature=0, max_tokens=24)
    whole = stub(server).Generate(request, timeout=60).outputs[0].text
    pieces = [output.text for message in stub(server).GenerateStream(request, timeout=60) for output in message.outputs]
    assert complete(server, PROMPT, max_tokens=24) == streamed == whole == "".join(pieces)


def test_the_openai_client_completes_and_streams(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
        stream = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.completions.create(model="nobody", prompt=PROMPT)
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_prompts_sent_together_get_the_text_they_get_apart(server: Server) -> None:
    prompts = [PROMPT, "import os\n\nclass Path:\n", "for key, value in", "    def __init__(self"]
    apart = [complete(server, prompt, max_tokens=48) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt, max_tokens=48), prompts))
    assert apart == together


def test_a_client_that_leaves_over_http_frees_its_blocks(server: Server) -> None:
    aborted = {"transport": "http", "outcome": "abort"}
    before = server.metric("attend_requests_total", **aborted)
    lines = post(server, prompt=PROMPT, stream=True, **LONG)
    next(lines)
    assert server.metric("attend_kv_cache_usage") > 0
    lines.close()
    assert wait_for(lambda: idle(server), 5)
    assert wait_for(lambda: server.metric("attend_requests_total", **aborted) == before + 1, 5)


def test_a_client_that_leaves_over_grpc_frees_its_blocks(server: Server) -> None:
    aborted = {"transport": "grpc", "route": "GenerateStream", "outcome": "abort"}
    before = server.metric("attend_requests_total", **aborted)
    request = pb.GenerateRequest(text=PROMPT, max_tokens=900, stopping=pb.StoppingCriteria(ignore_eos=True))
    call = stub(server).GenerateStream(request, timeout=60)
    next(call)
    assert server.metric("attend_kv_cache_usage") > 0
    call.cancel()
    assert wait_for(lambda: idle(server), 5)
    assert wait_for(lambda: server.metric("attend_requests_total", **aborted) == before + 1, 5)


def test_bytes_that_are_no_message_are_an_invalid_argument(server: Server) -> None:
    channel = grpc.insecure_channel(server.target)
    call = channel.unary_unary("/attend.v1.GenerationService/Generate", lambda data: data, pb.GenerateResponse.FromString)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff\xff\xff", timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest" in caught.value.details()


def test_counters_equal_what_clients_received_over_two_replicas(pair: Server) -> None:
    def one(number: int) -> int:
        lines = post(pair, prompt=PROMPT, stream=True, max_tokens=8 + number, ignore_eos=True, seed=number)
        return sum(
            1 for line in lines if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"] is not None
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(24)))
    assert len(pair.replicas()) == 2
    assert pair.metric("attend_scrape_replicas_answered") == pair.metric("attend_scrape_replicas_expected") == 2
    assert pair.metric("attend_generation_tokens_total") == sum(8 + number for number in range(24))
    assert pair.metric("attend_requests_total", outcome="length") == 24
    assert pair.metric("attend_prompt_tokens_total") == 24 * server_prompt_tokens(pair)


def server_prompt_tokens(server: Server) -> int:
    (line,) = post(server, prompt=PROMPT, max_tokens=1, temperature=0)
    return json.loads(line)["usage"]["prompt_tokens"]


def test_two_servers_never_answer_each_others_calls(server: Server, pair: Server) -> None:
    for one, name in ((server, "attend-default"), (pair, "second")):
        for _ in range(20):
            assert json.loads(one.get("/v1/models")[1])["data"][0]["id"] == name
            stub(one).Generate(pb.GenerateRequest(text="x", max_tokens=1, model=name), timeout=30)


def attend(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "service.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_taken_port_stops_the_start_with_its_number(server: Server) -> None:
    done = attend("serve", "--port", str(server.http), "--grpc-port", str(free_port()))
    assert done.returncode == 2
    assert done.stderr == f"attend: port {server.http} is taken: another process listens on it\n"


def test_a_checkpoint_that_is_only_found_bad_by_its_values_stops_the_start_too(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(DEFAULT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    port, grpc_port = map(str, free_ports(2))
    done = attend("serve", str(folder), "--port", port, "--grpc-port", grpc_port)
    assert done.returncode == 2
    assert "model.safetensors: tensor model.norm.weight holds NaN or infinity" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_it_within_seconds_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path / "log") as server:
        assert wait_for(lambda: "Loading" in server.output(), 60), server.output()
        assert wait_for(lambda: any("haproxy" in line for line in command_lines(server)), 60), server.output()
        assert server.stop(number, within=20) < 15
        assert server.process.returncode == 0, server.output()
        assert "Traceback" not in server.output()
        assert server.processes() == []


def command_lines(server: Server) -> list[str]:
    """What each process of the server runs."""
    found = []
    for pid in server.processes():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_sigterm_lets_streams_end_refuses_new_calls_and_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--drain-seconds", "60", *SLOW)
    with running(tmp_path / "log", *flags) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        started = threading.Event()
        http = pool.submit(read_all, post(server, prompt=PROMPT, stream=True, **LONG | {"max_tokens": 400}), started)
        request = pb.GenerateRequest(text=PROMPT, max_tokens=400, stopping=pb.StoppingCriteria(ignore_eos=True))
        messages = pool.submit(list, stub(server).GenerateStream(request, timeout=120))
        assert started.wait(60)
        assert wait_for(lambda: server.metric("attend_requests_running") == 2)
        ending = pool.submit(server.stop, within=60 + 5)
        assert wait_for(lambda: server.get("/readyz")[0] == 503)
        assert not http.done() and not messages.done()
        with pytest.raises(grpc.RpcError) as caught:
            stub(server).Generate(request, timeout=30)
        lines = http.result()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert lines[-2] == b"data: [DONE]\n"
        assert json.loads(lines[-4][6:])["choices"][0]["finish_reason"] == "length"
        assert messages.result()[-1].outputs[0].finish_info.num_output_tokens == 400
        assert ending.result() < 60 + 5
        assert server.process.returncode == 0
        assert server.processes() == []


def read_all(lines: Iterator[bytes], started: threading.Event) -> list[bytes]:
    """Every line, with an event at the first."""
    kept = []
    for line in lines:
        started.set()
        kept.append(line)
    return kept


def test_a_drain_that_is_too_short_ends_streams_with_their_reason(tmp_path: Path) -> None:
    flags = ("--drain-seconds", "0.5", "--max-model-len", "1024", "--proxy", "python", *SLOW)
    with running(tmp_path / "log", *flags) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        started = threading.Event()
        stream = pool.submit(read_all, post(server, prompt=PROMPT, stream=True, n=8, **LONG), started)
        assert started.wait(60)
        server.stop(signal.SIGINT)
        lines = stream.result()
        reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines if line.startswith(b"data: {")]
        assert lines[-2] == b"data: [DONE]\n"
        assert reasons.count("abort") == 8
        assert server.processes() == []


@pytest.mark.parametrize("victim", ["service.driver", "service.cli"])
def test_a_server_killed_outright_leaves_no_process(tmp_path: Path, victim: str) -> None:
    """Without the supervisor, HAProxy would keep the ports and answer 500 for ever."""
    with running(tmp_path / "log") as server:
        os.kill(server.pid_of(victim), signal.SIGKILL)
        assert wait_for(lambda: server.processes() == [], 60), server.processes()
