"""`attend serve --models`: real processes of models behind one HTTP and one gRPC port."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import openai
import pytest

from attend.model.config import DEFAULT_MODEL
from attend.v1 import generation_pb2 as pb
from tests.model.adapters import linears, write_adapter
from tests.service.server import Server, running, started, wait_for
from tests.service.test_contract import stub
from tests.service.test_end_to_end import attend

pytestmark = pytest.mark.ray

FLAGS = ("--dtype", "float32", "--backend", "torch", "--num-threads", "1")
FILE = """
idle_seconds: 0
models:
- name: first
- name: second
  settings: {max_model_len: 256, adapter: tone=TONE, adapters_folder: FOLDER}
- name: broken
  model: BROKEN
"""
GREEDY = {"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}


def write(folder: Path, text: str = FILE) -> Path:
    """A file of models, of which `broken` has no weights."""
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_bytes((Path(__file__).parents[4] / "model" / "default" / "config.json").read_bytes())
    path = folder / "models.yaml"
    path.write_text(
        text.replace("BROKEN", str(broken)).replace("TONE", str(folder / "tone")).replace("FOLDER", str(folder / "lora"))
    )
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    modules = linears(DEFAULT_MODEL, ["q_proj", "v_proj", "down_proj"])
    write_adapter(folder / "tone", modules, 1)
    (folder / "lora").mkdir()
    write_adapter(folder / "lora" / "code", modules, 2)
    with running(folder / "log", "--models", str(write(folder)), *FLAGS) as server:
        yield server


def client_of(server: Server, **more) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120, **more)


def ask(server: Server, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body):
    """(status, headers, body) of a POST."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {})
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def statuses(server: Server) -> dict[str, str]:
    return {one["id"]: one["status"] for one in json.loads(server.get("/v1/models")[1])["data"]}


def children(server: Server) -> list[int]:
    return [pid for pid in server.processes() if pid != server.process.pid]


def test_models_load_at_their_first_call_and_answer_alike_over_both_transports(server: Server) -> None:
    assert statuses(server)["second"] == "unloaded"
    whole = client_of(server).completions.create(model="second", **GREEDY)
    assert whole.model == "second"
    assert statuses(server)["second"] == "loaded"
    streamed = client_of(server).completions.create(model="second", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    request = pb.GenerateRequest(text=GREEDY["prompt"], max_tokens=24, temperature=0, model="second")
    assert stub(server).Generate(request, timeout=60).outputs[0].text == whole.choices[0].text
    assert "".join(r.outputs[0].text for r in stub(server).GenerateStream(request, timeout=60)) == whole.choices[0].text
    chat = client_of(server).chat.completions.create(
        model="first", messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=4, stream=True
    )
    assert next(iter(chat)).model == "first"
    loaded = dict.fromkeys(("first", "second", "tone", "code"), "loaded")
    assert statuses(server) == loaded | {"broken": "unloaded"}
    listed = {one.id: one for one in client_of(server).models.list().data}
    assert (listed["first"].max_model_len, listed["second"].max_model_len) == (1024, 256)
    assert len(children(server)) == 2


def test_a_call_that_names_no_model_goes_to_the_default_one(server: Server) -> None:
    assert json.loads(ask(server, **GREEDY)[2])["model"] == "first"
    assert stub(server).GetServerInfo(pb.GetServerInfoRequest(), timeout=60).model == "first"
    assert "eos_token" in json.loads(server.get("/tokenizer_info?model=second")[1])
    assert json.loads(server.get("/v1/capacity?model=second&max_tokens=4")[1])["max_model_len"] == 256


def test_a_name_of_an_adapter_leads_to_its_model_over_both_transports(server: Server) -> None:
    texts = {
        name: json.loads(ask(server, model=name, **GREEDY)[2])["choices"][0]["text"] for name in ("second", "tone", "code")
    }
    assert len(set(texts.values())) == 3
    for name in ("tone", "code"):
        request = pb.GenerateRequest(text=GREEDY["prompt"], max_tokens=24, temperature=0, adapter=name)
        assert stub(server).Generate(request, timeout=60).outputs[0].text == texts[name]
        assert json.loads(server.get(f"/v1/models/{name}")[1])["parent"] == "second"


def test_errors_name_the_model_over_both_transports(server: Server) -> None:
    for model, status, code, rpc in (
        ("nobody", 404, "model_not_found", grpc.StatusCode.NOT_FOUND),
        ("broken", 503, "model_unavailable", grpc.StatusCode.UNAVAILABLE),
    ):
        got, headers, text = ask(server, model=model, **GREEDY)
        assert (got, json.loads(text)["error"]["code"]) == (status, code)
        assert model in json.loads(text)["error"]["message"]
        assert (headers["retry-after"] is not None) == (status == 503)
        with pytest.raises(grpc.RpcError) as caught:
            stub(server).Generate(pb.GenerateRequest(text="a", model=model), timeout=60)
        assert caught.value.code() is rpc
        assert model in caught.value.details()
    assert statuses(server)["broken"] == "failed"
    assert wait_for(lambda: "model.safetensors is missing" in server.output())
    assert ask(server, model="first", temperature=9, prompt="a")[0] == 400
    assert server.get("/v1/models/nobody")[0] == 404
    assert server.get("/v1/capacity?model=broken")[0] == 503
    assert server.get("/nowhere")[0] == 404


def test_the_servers_own_routes_answer(server: Server) -> None:
    assert {ask(server, model=name, **GREEDY)[0] for name in ("first", "second")} == {200}
    assert server.get("/healthz") == (200, "ok\n")
    assert server.get("/readyz") == (200, "ready\n")
    assert json.loads(server.get("/version")[1])["grpc_port"] == server.grpc
    assert json.loads(server.get("/v1/models/second")[1])["status"] == "loaded"
    assert "/v1/chat/completions" in json.loads(server.get("/openapi.json")[1])["paths"]
    assert server.get("/docs")[0] == 200
    assert server.metric("attend_model_state", model="first", state="loaded") == 1
    assert server.metric("attend_requests_total", model="second") > 0
    assert server.metric("attend_scrape_replicas_answered") == 2
    done = attend("check", server.url, "--grpc", server.target)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_caller_who_leaves_frees_the_model_on_both_transports(server: Server) -> None:
    endless = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "model": "first"}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(endless).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        assert wait_for(lambda: server.metric("attend_model_calls", model="first") == 1)
    call = stub(server).GenerateStream(
        pb.GenerateRequest(text="a", max_tokens=900, model="first", stopping=pb.StoppingCriteria(ignore_eos=True)), timeout=60
    )
    next(call)
    call.cancel()
    assert wait_for(lambda: server.metric("attend_model_calls", model="first") == 0)
    assert wait_for(lambda: server.metric("attend_requests_running", model="first") == 0)


def test_a_process_that_is_killed_ends_its_calls_with_an_error_and_the_next_call_starts_it_anew(server: Server) -> None:
    ask(server, **GREEDY)
    before = children(server)
    endless = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "model": "first"}
    begun = threading.Event()

    def streamed() -> list[bytes]:
        request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(endless | {"stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [answer.readline()]
            begun.set()
            return lines + answer.readlines()

    with ThreadPoolExecutor() as pool:
        stream = pool.submit(streamed)
        whole = pool.submit(ask, server, **endless)
        rpc = pool.submit(stub(server).Generate, pb.GenerateRequest(text="a", max_tokens=900, model="first",
                          stopping=pb.StoppingCriteria(ignore_eos=True)), timeout=60)  # fmt: skip
        assert begun.wait(60)
        assert wait_for(lambda: server.metric("attend_model_calls", model="first") == 3)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        lines = stream.result()
        assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
        assert json.loads(lines[-4].removeprefix(b"data: "))["error"]["code"] == "model_unavailable"
        status, _, text = whole.result()
        assert (status, json.loads(text)["error"]["code"]) == (503, "model_unavailable")
        assert rpc.exception().code() is grpc.StatusCode.UNAVAILABLE
        assert "first" in rpc.exception().details()
    assert wait_for(lambda: server.metric("attend_model_deaths_total", model="first") == 1)
    assert wait_for(lambda: ask(server, **GREEDY)[0] == 200, 60)
    assert wait_for(lambda: "the process of the model first ended: by SIGKILL" in server.output())


def test_no_process_stays_behind_where_the_server_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path, "models: [{name: a, pin: true}, {name: b}]")
    with started(tmp_path / "log", "--models", str(path), *FLAGS) as server:
        server.wait_ready()
        assert len(children(server)) == 1
        with ThreadPoolExecutor() as pool:
            loading = pool.submit(ask, server, model="b", **GREEDY)
            assert wait_for(lambda: len(children(server)) == 2)
            time.sleep(0.5)
            server.stop(signal.SIGKILL, within=30)
            loading.exception()
        assert wait_for(lambda: server.processes() == [], 10), server.output()


def test_sigterm_lets_a_stream_end_and_refuses_new_calls_and_a_frozen_process_holds_no_caller(tmp_path: Path) -> None:
    path = write(tmp_path, "models: [{name: a}, {name: b}]")
    with running(tmp_path / "log", "--models", str(path), *FLAGS) as server, ThreadPoolExecutor() as pool:
        assert ask(server, model="b", **GREEDY)[0] == 200
        [frozen] = children(server)
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        status, _, text = ask(server, model="b", **GREEDY)
        assert (status, json.loads(text)["error"]["code"]) == (503, "model_unavailable")
        assert time.monotonic() - began < 6, "5, and what a busy machine adds"
        long = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "model": "a"}
        stream = pool.submit(ask, server, **long)
        assert wait_for(lambda: server.metric("attend_model_calls", model="a") == 1 and statuses(server)["a"] == "loaded", 60)
        ending = pool.submit(server.stop, signal.SIGTERM, 60)
        assert wait_for(lambda: server.get("/readyz")[0] == 503)
        assert ask(server, model="a", **GREEDY)[0] == 503
        status, _, text = stream.result()
        assert (status, text.count('"finish_reason":"length"'), text.endswith("data: [DONE]\n\n")) == (200, 1, True)
        assert ending.result() < 60
        assert server.process.returncode == 0


def test_nobody_without_a_key_has_a_model_loaded(tmp_path: Path) -> None:
    secret = attend("keys", "add", "me", "--requests-per-minute", "4", "--file", str(tmp_path / "keys.json")).stdout.strip()
    path = write(tmp_path, "models: [{name: a}, {name: b}]")
    words = ("--models", str(path), "--api-keys-file", str(tmp_path / "keys.json"), *FLAGS)
    with running(tmp_path / "log", *words) as server:
        for key in ({}, {"Authorization": "Bearer wrong"}):
            assert ask(server, headers=key, model="a", **GREEDY)[0] == 401
        with pytest.raises(grpc.RpcError) as caught:
            stub(server).Generate(pb.GenerateRequest(text="a", model="a"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert children(server) == []
        assert server.metric("attend_auth_failures_total") == 3
        keyed = {"Authorization": f"Bearer {secret}"}
        assert [ask(server, headers=keyed, model=name, **GREEDY)[0] for name in "abab"] == [200] * 4
        status, headers, _ = ask(server, headers=keyed, model="a", **GREEDY)
        assert (status, headers["retry-after"] is not None) == (429, True), "its minute is one over all models"


def test_a_bad_file_and_a_pinned_model_that_does_not_load_stop_the_start_with_status_2(tmp_path: Path) -> None:
    path = write(tmp_path, "models: [{name: a, memroy: 1GiB}]")
    done = attend("serve", "--models", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"attend: {path}: models[0].memroy is not a field: did you mean memory?")
    path = write(tmp_path, "models: [{name: a, model: BROKEN, pin: true}]")
    done = attend("serve", "--models", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"attend: {path}: models[0] ('a'): ") and "model.safetensors is missing" in done.stderr
