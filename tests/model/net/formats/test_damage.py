"""Whatever a quantised folder says or holds, it is read or refused with a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder
from attend.model.weights import read_json
from tests.model.checkpoints import edit_config
from tests.model.net.formats.test_compressed_tensors import args, compressed, settings
from tests.model.net.formats.test_fp8 import BLOCKS, fp8
from tests.model.net.formats.writing import AWQ, GPTQ, awq, gptq, pack_folder, plain_folder

FOLDERS = {
    "awq": (awq(64), AWQ | {"group_size": 64}),
    "gptq": (gptq(4, 64), GPTQ | {"bits": 4, "group_size": 64}),
    "packed": (compressed("pack-quantized", args(4, "group")), settings("pack-quantized", args(4, "group"))),
    "bytes": (compressed("int-quantized", args(8, "channel")), settings("int-quantized", args(8, "channel"))),
    "fp8": (fp8("blocks"), BLOCKS),
}
ODD = [None, True, -1, 10**9, "x", [1], ["re:("], {"x": [[]]}]


def changed(value: Any) -> list[Any]:
    """The value with each part of it, in turn, missing or odd."""
    found = list(ODD)
    if isinstance(value, dict):
        for key, part in value.items():
            found += [value | {key: other} for other in changed(part)]
            found.append({other: each for other, each in value.items() if other != key})
    return found


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path) -> Path:
    pack, said = FOLDERS[request.param]
    plain = plain_folder(tmp_path / "plain", num_hidden_layers=1, hidden_size=64, head_dim=16, intermediate_size=128)
    return pack_folder(plain, pack, said)


def is_refused(folder: Path) -> bool:
    try:
        load_decoder(folder, torch.float32, "cpu", keep_codes=True)
    except CheckpointError:
        return True
    inspect(folder)
    return False


def test_odd_settings_are_refused_or_change_nothing_that_is_needed(folder):
    refused = 0
    for value in changed(read_json(folder, "config.json")["quantization_config"]):
        edit_config(folder, quantization_config=value)
        refused += is_refused(folder)
    assert refused > 20


def odd_tensors(tensor: Tensor) -> list[Tensor]:
    """Of other types and shapes."""
    flat = tensor.flatten()[:1]
    shapes = [flat.reshape(()), flat, tensor[None], tensor[:1], tensor[:0], tensor.flatten()]
    types = [
        torch.zeros(tensor.shape, dtype=each) for each in (torch.int8, torch.int64, torch.float64, torch.bool, torch.uint8)
    ]
    return [each.clone().contiguous() for each in (*shapes, *types)]


def test_odd_tensors_are_refused_or_mean_the_same(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    refused = 0
    for name in [name for name in tensors if "down_proj" in name]:
        for odd in odd_tensors(tensors[name]):
            save_file(tensors | {name: odd}, path, metadata={"format": "pt"})
            refused += is_refused(folder)
        save_file({other: each for other, each in tensors.items() if other != name}, path, metadata={"format": "pt"})
        refused += is_refused(folder)
    assert refused > 10
