"""`attend doctor` says what is here, and each planted fault in a sentence with status 1. No GPU ran: stand-ins answer."""

import json
import sys
import time

import pytest
import torch

from attend.model import devices
from attend.model.engine import speed_estimate
from attend.model.engine.speed_estimate import Speed, count_parameters, measured_layers, products, read_bytes
from attend.model.engine.startup import layers_by_kind, on_meta
from attend.model.errors import SettingError
from attend.model.net.checkpoint import read_config
from attend.model.net.formats.codes import INT4
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.native.library import variant
from attend.model.shapes import SHAPES, write_config
from attend.service.commands import cli, doctor
from attend.service.settings import Settings
from tests.model.checkpoints import KINDS, tiny_config, write_checkpoint, write_letters

needs_native = pytest.mark.skipif(variant() in ("", "portable"), reason="no fast native decoder is built here")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Small matrices, and steps that are timed for a moment."""
    monkeypatch.setattr(doctor, "SIZES", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(speed_estimate, "SECONDS", 0.01)
    monkeypatch.setattr(devices, "read_rate", lambda: 1e10)
    monkeypatch.setattr(devices, "nvidia_here", lambda root=None: "")


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint("llama", tmp_path / "tiny")


@pytest.fixture
def look(capfd):
    """(status, what --json prints) of a doctor."""

    def run(shape=None, **settings):
        status = doctor.show(Settings(**{"num_threads": 1} | settings), shape, as_json=True)
        return status, json.loads(capfd.readouterr().out)

    return run


def failed(found):
    return {check["name"]: check["detail"] for check in found["checks"] if check["outcome"] == "failed"}


@needs_native
def test_a_model_that_is_served_well_is_fine(look, folder):
    status, found = look(model=str(folder))
    assert (status, failed(found)) == (0, {})
    assert found["verdict"].startswith("Fine: tiny on cpu (") and found["verdict"].endswith(
        f" by the native-{variant()} backend"
    )
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert {"decoder", "sampler", "processor", "native library"} <= details.keys()
    assert all("tokens/s" in details[work] for work in ("1 stream", "8 streams", "prompt of 128"))


@needs_native
def test_a_shape_needs_no_model(look):
    status, found = look("S")
    assert status == 0 and found["verdict"].startswith("Fine: shape S on cpu")


@pytest.mark.parametrize(("name", "nearest"), [("8B", "llama-8b"), ("Qwen3_4B", "qwen3-4b"), ("m", "M")])
def test_an_unknown_shape_names_the_nearest(name, nearest):
    with pytest.raises(SettingError, match=f"there is no shape '{name}'; the nearest is {nearest}; known: S, M"):
        doctor.show(Settings(), name, as_json=True)


@needs_native
@pytest.mark.parametrize("mode", ["replace", "fail"])
def test_a_native_library_whose_answers_differ_is_not_fine_whatever_a_server_would_do(look, folder, monkeypatch, mode):
    right = NativeDecoder.__call__
    monkeypatch.setattr(NativeDecoder, "__call__", lambda self, *given: right(self, *given).roll(1, 0))
    status, found = look(model=str(folder), kernel_check=mode)
    assert status == 1 and failed(found)["decoder"].startswith("hidden states differ")
    assert found["verdict"].startswith("Not fine: backend: bfloat16 by the torch backend; ")
    assert "8 streams" in [check["name"] for check in found["checks"]], "what serves in its place is timed"


def test_a_gpu_that_torch_cannot_use_is_not_fine(look, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(devices, "nvidia_here", lambda root=None: "/dev/nvidia0")
    status, found = look(model=str(folder))
    assert status == 1
    assert "an NVIDIA GPU is here (/dev/nvidia0), and torch cannot use it" in failed(found)["GPU"]
    assert look(model=str(folder), device="cpu")[0] == 0 or variant() == ""


def test_a_device_that_is_not_there_is_not_fine(look, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, found = look(model=str(folder), device="cuda")
    assert status == 1 and failed(found)["GPU"].startswith("device is cuda, but this process sees no CUDA device")


def test_a_library_that_is_not_built_is_said_with_what_to_do(look, folder, monkeypatch):
    monkeypatch.setattr("attend.model.backends.native.load_library", lambda: None)
    monkeypatch.setattr(doctor, "absence", lambda: ("no_compiler", "it was not built: install g++, and start again"))
    status, found = look(model=str(folder))
    assert status == 1 and failed(found)["native library"].endswith("install g++, and start again")


@pytest.mark.parametrize(
    ("model", "words"),
    [("hf://org/name", "is not in the cache of the hub: download it with attend pull"), ("broken", "config.json")],
)
def test_a_model_that_would_not_be_served_is_not_fine(look, folder, tmp_path, monkeypatch, model, words):
    monkeypatch.setattr(doctor.hub, "cached_folder", lambda reference: None)
    if model == "broken":
        (folder / "config.json").write_text('{"model_type": "llama"}')
        model = str(folder)
    status, found = look(model=model)
    assert status == 1 and words in failed(found)["model"]


def test_weights_that_do_not_fit_are_not_fine(look, folder, monkeypatch):
    monkeypatch.setattr(doctor.machine, "available_memory", lambda: 1000)
    status, found = look(model=str(folder))
    assert status == 1 and "model" in failed(found)


def test_what_would_be_faster_is_said(look, folder, monkeypatch):
    monkeypatch.setattr(doctor.machine, "usable_cores", lambda: 8)
    monkeypatch.setattr(doctor.machine, "large_pages", lambda: "never")
    advice = " ".join(look(model=str(folder), dtype="float32")[1]["advice"])
    assert "num_threads is 1, and there are 8 cores" in advice and "large pages are off" in advice
    assert "dtype is float32: bfloat16 halves" in advice or variant() in ("", "portable")


def test_it_ends_with_what_it_knows_where_something_hangs(folder, monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(doctor, "LIMIT", 0.2)
    monkeypatch.setattr(doctor.os, "_exit", ended.append)
    monkeypatch.setattr(doctor, "choose_way", lambda *given: time.sleep(1.5) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        doctor.show(Settings(model=str(folder)), None, as_json=True)
    found = json.loads(capfd.readouterr().out)
    assert ended == [1]
    assert found["verdict"] == "Not fine: kernels: it did not end within 0 s"


def test_a_gpu_is_described_by_what_torch_says(look, folder, monkeypatch):
    properties = {"name": "Tesla T4", "major": 7, "minor": 5, "total_memory": 16 << 30, "multi_processor_count": 40}
    properties |= {"shared_memory_per_block_optin": 65536}
    for name, answer in {
        "is_available": True,
        "init": None,
        "get_device_properties": type("Properties", (), properties),
        "device_count": 1,
        "mem_get_info": (15 << 30, 16 << 30),
        "get_device_capability": (7, 5),
        "get_device_name": "Tesla T4",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, answer=answer: answer)
    monkeypatch.setattr(doctor, "use_threads", lambda options: None)
    chosen = []

    def choose(folder, config, options, device, ranks):
        chosen.append(device)
        raise SettingError("no kernels here")

    monkeypatch.setattr(doctor, "choose_way", choose)
    monkeypatch.setattr(devices, "rates", lambda device, size, dtype: {"bytes": 3e11, "flops": 6e13})
    status, found = look(model=str(folder))
    [gpu] = [check for check in found["checks"] if check["name"] == "GPU"]
    assert gpu["detail"].startswith("Tesla T4, compute capability 7.5, 16.1 of 17.2 GB free, driver ")
    assert "older than Ampere" in found["advice"][0]
    assert chosen == ["cuda"] and failed(found)["model"] == "no kernels here" and status == 1


def test_the_command_prints_a_line_for_each_check_and_the_verdict_last(monkeypatch, capfd, folder):
    monkeypatch.setattr(sys, "argv", ["attend", "doctor", str(write_letters(folder))])
    with pytest.raises(SystemExit) as end:
        cli.main()
    lines = capfd.readouterr().out.splitlines()
    assert end.value.code == 0 or variant() == ""
    assert lines[0].startswith("ok ") and "packages" in lines[0]
    assert lines[-1].startswith("Fine: tiny on cpu") or variant() == ""


# Speed


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_that_are_measured_are_a_model(kind, tmp_path):
    config = read_config(write_checkpoint(kind, tmp_path / "tiny"))
    small = measured_layers(config, "cpu")
    assert len(layers_by_kind(small)) == len(layers_by_kind(config)) and small.num_layers <= config.num_layers


def test_a_large_model_is_measured_by_some_of_its_layers(tmp_path):
    config = read_config(write_config("llama-8b", tmp_path))
    small = measured_layers(config, "cpu")
    assert (small.num_layers, small.hidden_size, small.mlp_size) == (1, 4096, 14336)
    whole, part = on_meta(config, None, 0), on_meta(small, None, 0)
    unread = 65 * 4096 + 128256 * 4096
    assert read_bytes(whole, torch.bfloat16, 1) == 2 * (count_parameters(config) - unread), "all but norms and embedding"
    assert products(whole) / products(part) == pytest.approx(7.5e9 / (0.218e9 + 0.134e9), rel=0.01)
    assert read_bytes(on_meta(config, INT4, 0), torch.bfloat16, 1) < 0.33 * read_bytes(whole, torch.bfloat16, 1)
    assert measured_layers(read_config(write_config("S", tmp_path)), "cpu").num_layers == SHAPES["S"]["num_hidden_layers"]


def test_a_layer_that_is_too_large_is_not_drawn():
    assert measured_layers(tiny_config(hidden_size=16384, mlp_size=65536, num_heads=128, head_size=128), "cpu") is None


def test_streams_share_the_experts_that_they_read():
    config = tiny_config(num_experts=8, experts_per_token=2, expert_size=64)
    net = on_meta(config, None, 0)
    one, many = (read_bytes(net, torch.bfloat16, streams) for streams in (1, 1000))
    assert one < many <= 2 * net.num_parameters


def test_a_share_is_of_the_limit():
    assert Speed("1 stream", 30.0, 40.0).share == 0.75
