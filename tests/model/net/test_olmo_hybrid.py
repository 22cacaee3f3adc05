"""The spellings of OLMo Hybrid's tensors, and the keys of its config.json."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from attend.model.net.checkpoint import inspect, load_decoder, read_config
from tests.model.checkpoints import edit_config, edit_tensors, write_checkpoint
from tests.model.net.test_qwen3_5 import same


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("olmo_hybrid", tmp_path)


def with_place(folder: Path, old: str, new: str, layers: tuple[int, ...]) -> dict[str, Any]:
    """Changes of tensors: another name for those of some layers."""
    changes: dict[str, Any] = {}
    for layer in layers:
        name, other = (f"model.layers.{layer}.{part}" for part in (old, new))
        tensors = load_file(folder / "model.safetensors")
        if name in tensors:
            changes |= {name.replace(".", "__"): ..., other.replace(".", "__"): tensors[name]}
    return changes


def test_every_spelling_of_the_names_is_read(folder):
    """Those that `transformers` writes, those of published files, and those of the model in memory."""
    expected, names = load_decoder(folder, torch.float32, "cpu"), load_file(folder / "model.safetensors").keys()
    assert {f"model.layers.0.linear_attn.{x}_conv1d.weight" for x in "qkv"} <= names
    assert {"model.layers.3.feedforward_layer_norm.weight", "model.layers.0.attention_layer_norm.weight"} <= names
    second = "feedforward_layer_norm.weight", "post_attention_layernorm.weight"
    edit_tensors(folder, **with_place(folder, *second, (3,)))
    assert same(expected, load_decoder(folder, torch.float32, "cpu"))
    first = "attention_layer_norm.weight", "input_layernorm.weight"
    edit_tensors(folder, **with_place(folder, *second, (0, 1, 2)), **with_place(folder, *first, (0, 1, 2)))
    for layer in range(3):
        start = f"model__layers__{layer}__linear_attn"
        joined = expected.blocks[layer].attention.convolution
        edit_tensors(folder, **{f"{start}__{x}_conv1d__weight": ... for x in "qkv"}, **{f"{start}__conv1d__weight": joined})
    inspect(folder)
    assert same(expected, load_decoder(folder, torch.float32, "cpu"))


ROTATED: list[tuple[dict[str, Any], bool]] = [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
    ({"rope_parameters": {"rope_theta": None}, "rope_theta": 500.0}, False),
    ({"rope_parameters": None, "rope_theta": None}, False),
    ({"rope_parameters": ...}, True),
    ({"rope_parameters": None}, True),
    ({"rope_parameters": {"rope_type": "default"}}, True),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, True),
]


@pytest.mark.parametrize(("changes", "rotates"), ROTATED, ids=str)
def test_only_a_theta_of_null_means_that_nothing_is_rotated(folder, changes, rotates):
    edit_config(folder, **changes)
    theirs = AutoConfig.from_pretrained(folder).rope_parameters.get("rope_theta")
    ours = read_config(folder)
    assert rotates == bool(ours.ropes) == (theirs is not None)
    assert not rotates or ours.rope_theta == theirs
