"""LoRA adapters that callers name: as a model over HTTP, as a field over gRPC; a folder is followed while the server runs."""

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from attend.model.errors import CheckpointError, SettingError
from attend.service.generation.adapters import AdapterRegistry
from attend.service.settings import Settings, read_settings
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import MODEL, FakeEngine, build_server, grpc_channel
from tests.service.bad_calls import whole_server


@dataclass(frozen=True, eq=False)
class FakeAdapter:
    """What a folder holds, in place of an adapter."""

    digest: str


class FakeReader:
    """Reads a folder's one file; counts how often."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def read(self, folder: Path) -> Any:
        self.reads.append(folder.name)
        text = (folder / "content").read_text()
        if text.startswith("bad"):
            raise CheckpointError(f"{folder / 'content'}: tensor x is missing")
        if text.startswith("large"):
            raise MemoryError
        return FakeAdapter(text)


def put(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "content").write_text(text)
    return folder / name


def shelf_of(folder: Path | None, *, most: int = 8, **fixed: Path) -> tuple[AdapterRegistry, FakeReader]:
    reader = FakeReader()
    return AdapterRegistry(reader, fixed, folder, most=most, reserved_name=MODEL), reader


# --- the folder


def test_a_folder_is_followed(tmp_path):
    """What comes is found at the next look, what changes is read again, what goes is gone; nothing else is read twice."""
    put(tmp_path, "a", "one")
    adapter_registry, reader = shelf_of(tmp_path)
    assert adapter_registry.names == ["a"]
    put(tmp_path, "b", "two")
    adapter_registry.look()
    assert (adapter_registry.names, reader.reads) == (["a", "b"], ["a", "b"])
    old = adapter_registry.get("a")
    put(tmp_path, "a", "another")
    adapter_registry.look()
    assert (old.digest, adapter_registry.get("a").digest, reader.reads) == ("one", "another", ["a", "b", "a"])
    (tmp_path / "b").rename(tmp_path / ".b")
    adapter_registry.look()
    assert (adapter_registry.names, adapter_registry.get("b"), reader.reads) == (["a"], None, ["a", "b", "a"])


def test_one_that_does_not_fit_into_memory_is_told_and_the_others_are_followed(tmp_path, caplog):
    put(tmp_path, "a", "large")
    adapter_registry, _ = shelf_of(tmp_path)
    assert "'a' is not loaded: out of memory" in caplog.text
    put(tmp_path, "b", "two")
    adapter_registry.look()
    assert adapter_registry.names == ["b"]


def test_a_bad_one_is_told_once_harms_no_other_and_serves_once_it_is_good(tmp_path, caplog):
    """Also where it was good before: then it is not served, for nobody knows which of the two is meant."""
    put(tmp_path, "a", "one"), put(tmp_path, "b", "bad")
    adapter_registry, reader = shelf_of(tmp_path)
    assert adapter_registry.names == ["a"]
    for _ in range(3):
        adapter_registry.look()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"the adapter 'b' is not loaded: {tmp_path}/b/content: tensor x is missing"
    assert reader.reads == ["a", "b"]
    put(tmp_path, "a", "bad too"), put(tmp_path, "b", "good")
    adapter_registry.look()
    assert adapter_registry.names == ["b"]


def test_no_more_are_loaded_than_may_be(tmp_path, caplog):
    for name in "abc":
        put(tmp_path, name, name)
    adapter_registry, reader = shelf_of(tmp_path, most=2)
    assert (adapter_registry.names, reader.reads) == (["a", "b"], ["a", "b"])
    assert "the adapter 'c' is not loaded: max_adapters is 2" in caplog.text
    (tmp_path / "a").rename(tmp_path / ".a")
    adapter_registry.look()
    assert adapter_registry.names == ["b", "c"]


def test_what_the_settings_name_must_be_there_at_the_start(tmp_path):
    good, bad = put(tmp_path, "good", "one"), put(tmp_path, "bad", "bad")
    assert shelf_of(None, x=good)[0].names == ["x"]
    with pytest.raises(CheckpointError, match="tensor x is missing"):
        shelf_of(None, x=good, y=bad)
    with pytest.raises(SettingError, match=rf"another has the name '{MODEL}'"):
        shelf_of(None, **{MODEL: good})
    with pytest.raises(SettingError, match="adapter names 2 adapters, but max_adapters is 1"):
        shelf_of(None, most=1, x=good, y=good)
    with pytest.raises(SettingError, match=r"adapters_folder is '.*nowhere', which is not a folder"):
        shelf_of(tmp_path / "nowhere")


def test_a_folder_that_goes_leaves_what_is_loaded(tmp_path, caplog):
    put(tmp_path, "a", "one")
    adapter_registry, _ = shelf_of(tmp_path)
    tmp_path.rename(tmp_path.with_name("gone"))
    adapter_registry.look()
    assert adapter_registry.names == ["a"]
    assert "cannot be read: No such file or directory" in caplog.text


# --- the settings


def test_the_flag_and_the_variable_name_folders():
    settings = read_settings({}, {"ATTEND_ADAPTER": "a=/x, b=/y=z"})
    assert settings.adapters == {"a": Path("/x"), "b": Path("/y=z")}
    assert Settings().adapters == {}
    for bad in ("a", "a=", "=/x", "a=/x,a=/y", "a=/x,b"):
        with pytest.raises(SettingError, match=r"^adapter = .* cannot be used: it must be NAME=FOLDER"):
            read_settings({"adapter": bad}, {})


# --- the calls


@pytest.fixture
def adapter_registry(tmp_path) -> AdapterRegistry:
    put(tmp_path, "tone", "1"), put(tmp_path, "code", "2")
    return shelf_of(tmp_path)[0]


async def test_a_call_computes_with_the_adapter_that_it_names(adapter_registry):
    """Over both transports; one that names none, or the model itself, with none."""
    engine = FakeEngine()
    server = build_server(engine, adapter_registry=adapter_registry)

    shown = []
    async with server.http() as client, grpc_channel(server) as channel:
        for model in ("tone", "code", MODEL, None):
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": model})
            shown.append(answer.json()["model"])
        stub = GenerationServiceStub(channel)
        for fields in ({"adapter": "tone"}, {"model": MODEL, "adapter": "code"}, {"model": "code"}, {}):
            await stub.Generate(pb.GenerateRequest(text="a", max_tokens=1, **fields))
        shown += list((await stub.GetServerInfo(pb.GetServerInfoRequest())).adapters)
    found = shown
    assert found == ["tone", "code", MODEL, MODEL, "code", "tone"]
    named = [None if request.adapter is None else request.adapter.digest for request in engine.requests]
    assert named == ["1", "2", None, None, "1", "2", "2", None]


def test_answers_of_other_weights_have_other_fingerprints(adapter_registry, tmp_path):
    """The same over both transports, streamed or not, for the weights that computed them: also where a name got others."""
    server = whole_server()
    server.service.adapter_registry = adapter_registry

    async def prints(model: str) -> set[str]:
        found = set()
        async with server.http() as client, grpc_channel(server) as channel:
            stub, ask = GenerationServiceStub(channel), {"prompt": "a", "max_tokens": 2, "model": model}
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": model}
            for path, body in (("/v1/completions", ask), ("/v1/chat/completions", chat)):
                found.add((await client.post(path, json=body)).json()["system_fingerprint"])
                text = (await client.post(path, json=body | {"stream": True})).text
                events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                found |= {event["system_fingerprint"] for event in events}
            message = pb.GenerateRequest(text="a", max_tokens=2, model=model)
            found.add((await stub.Generate(message)).system_fingerprint)
            found |= {response.system_fingerprint async for response in stub.GenerateStream(message)}
        return found

    whole = "ab" * 32
    assert [asyncio.run(prints(model)) for model in (MODEL, "tone", "code")] == [{"fp_fake"}, {"fp_fake-1"}, {"fp_fake-2"}]
    put(tmp_path, "tone", whole)
    adapter_registry.look()
    assert asyncio.run(prints("tone")) == {f"fp_fake-{whole[:16]}"}


async def test_an_adapter_that_is_not_there_is_refused_as_an_unknown_model_is(adapter_registry):
    server = build_server(FakeEngine(), adapter_registry=adapter_registry)

    async with server.http() as client, grpc_channel(server) as channel:
        said = f"the model 'none' does not exist; this server has {MODEL!r}, 'code', 'tone': did you mean 'tone'?"
        for path in ("/v1/completions", "/tokenize"):
            answer = await client.post(path, json={"prompt": "a", "model": "none"})
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, said)
        stub = GenerationServiceStub(channel)
        wrong = [
            ({"adapter": "none"}, grpc.StatusCode.NOT_FOUND, said),
            (
                {"model": "tone", "adapter": "code"},
                grpc.StatusCode.INVALID_ARGUMENT,
                "name two adapters: 'code' and 'tone'",
            ),
            ({"adapter": MODEL}, grpc.StatusCode.NOT_FOUND, "is the served model, and no adapter of it"),
        ]
        for fields, code, words in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(text="a", max_tokens=1, **fields))
            assert caught.value.code() is code and words in caught.value.details()


async def test_each_adapter_is_a_model_with_its_parent(adapter_registry):
    server = build_server(FakeEngine(), adapter_registry=adapter_registry)

    async with server.http() as client:
        model, *adapters = (await client.get("/v1/models")).json()["data"]
        assert "parent" not in model
        assert adapters == [model | {"id": name, "parent": MODEL} for name in ("code", "tone")]
        assert (await client.get("/v1/models/tone")).json() == adapters[1]
        assert (await client.get("/v1/models/none")).status_code == 404


def test_a_stream_names_the_adapter_in_each_event(adapter_registry):
    server = build_server(FakeEngine(), adapter_registry=adapter_registry)
    answer = server.post({"prompt": "a", "max_tokens": 3, "model": "tone", "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert {event["model"] for event in events} == {"tone"}
