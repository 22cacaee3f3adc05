"""LoRA adapters on a real server with two replicas: they come and go with their folders, on every replica."""

from pathlib import Path

import grpc
import pytest

from attend.model.config import DEFAULT_MODEL
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.model.adapters import linears, write_adapter
from tests.service.server import Server, running, wait_for

pytestmark = pytest.mark.ray
PROMPT = "def fibonacci(n):"


def text(server: Server, model: str | None) -> str | int:
    """A greedy answer, or the status of a refusal."""
    status, _, document = server.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0, model=model)
    return document["choices"][0]["text"] if status == 200 else status


@pytest.mark.long
def test_adapters_come_and_go_on_every_replica(tmp_path: Path) -> None:
    modules = linears(DEFAULT_MODEL, ["qkv", "down", "out", "gate_up", "q_proj", "v_proj", "o_proj", "down_proj"])
    fixed, folder = write_adapter(tmp_path / "fixed", modules, 1), tmp_path / "adapters"
    folder.mkdir()
    flags = (
        "--adapter",
        f"tone={fixed}",
        "--adapter",
        f"same={fixed}",
        "--adapters-folder",
        str(folder),
        "--replicas",
        "2",
        "--num-threads",
        "1",
    )
    with running(tmp_path / "log", "--dtype", "float32", *flags) as server:
        plain, tone = text(server, None), text(server, "tone")
        assert plain != tone == text(server, "same")
        assert text(server, "code") == 404
        write_adapter(tmp_path / "new", modules, 2).rename(folder / "code")
        assert wait_for(lambda: all(text(server, "code") != 404 for _ in range(8)))
        code = text(server, "code")
        assert len({plain, tone, code}) == 3
        stub = rpc.GenerationServiceStub(grpc.insecure_channel(server.target))
        request = pb.GenerateRequest(text=PROMPT, max_tokens=12, temperature=0, adapter="code")
        assert stub.Generate(request, timeout=60).outputs[0].text == code
        (folder / "code").rename(tmp_path / "old")
        assert wait_for(lambda: all(text(server, "code") == 404 for _ in range(8)))
        assert (text(server, None), text(server, "tone")) == (plain, tone)
