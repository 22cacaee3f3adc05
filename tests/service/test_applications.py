"""Several models on one Ray cluster, an application a model: `deploy/serve/models.yaml`, with both transports."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.service.server import TAG, free_ports, processes_of, wait_for

FILE = Path(__file__).parents[2] / "deploy/serve/models.yaml"
MODELS = ("code", "chat")
START_SECONDS = 120.0
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    http, rpc = free_ports(2)
    log, tag = tmp_path_factory.mktemp("applications") / "log", f"applications-{http}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.applications", str(FILE), str(http), str(rpc)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={**os.environ, TAG: tag},
            start_new_session=True,
        )
    try:
        assert wait_for(lambda: b"Ready" in log.read_bytes() or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, log.read_text()
        assert wait_for(lambda: all(get(http, f"/{model}/readyz")[0] == 200 for model in MODELS))
        yield http, rpc
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            for pid in processes_of(tag):
                os.kill(pid, 9)


def get(port: int, path: str, **fields: object) -> tuple[int, str]:
    """(status, body) of a path; with fields, which are posted."""
    body = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("model", MODELS)
def test_each_model_answers_under_its_prefix_and_over_grpc_by_its_name(ports, model):
    http, rpc = ports
    assert [each["id"] for each in json.loads(get(http, f"/{model}/v1/models")[1])["data"]] == [model]
    asked = {"max_tokens": 6, "temperature": 0}
    status, text = get(http, f"/{model}/v1/completions", prompt="def f(", model=model, **asked)
    answer = json.loads(text)
    assert (status, answer["model"]) == (200, model)
    with grpc.insecure_channel(f"127.0.0.1:{rpc}") as channel:
        stub, metadata = GenerationServiceStub(channel), [("application", model)]
        said = stub.Generate(pb.GenerateRequest(text="def f(", model=model, **asked), metadata=metadata, timeout=60)
        assert stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=60).model == model
    assert said.outputs[0].text == answer["choices"][0]["text"]


def test_the_model_of_another_application_is_not_found_here(ports):
    status, text = get(ports[0], "/code/v1/completions", prompt="x", model="chat")
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/models", "/other/v1/models"])
def test_a_path_of_no_model_names_those_that_are_there(ports, path):
    status, text = get(ports[0], path)
    assert (status, json.loads(text)["error"]["message"]) == (404, "no application is at this path: there are /chat, /code")


@pytest.mark.parametrize("model", MODELS)
def test_what_looks_at_the_path_looks_at_it_within_the_application(ports, model):
    """Probes, the shape of Anthropic's errors, paths that are not there, the page and its files, and the document."""
    port, root = ports[0], f"/{model}"
    assert get(port, f"{root}/healthz")[1] == "ok\n"
    assert get(port, f"{root}/readyz")[0] == 200
    assert json.loads(get(port, f"{root}/v1/messages", x=1)[1])["type"] == "error"
    assert "/docs has the routes" in get(port, f"{root}/v1/completion", x=1)[1]
    assert all(get(port, root + path)[0] == 200 for path in ("/", "/static/common.js", "/docs", "/openapi.json"))


@pytest.mark.parametrize("model", MODELS)
def test_the_metrics_of_an_application_are_its_own(ports, model):
    page = get(ports[0], f"/{model}/metrics")[1]
    assert f'model="{model}"' in page
    assert not any(f'model="{other}"' in page for other in MODELS if other != model)
