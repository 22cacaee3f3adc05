"""The spellings of LFM3's tensors, and what is refused of its config.json."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attend.model.errors import CheckpointError, SettingError
from attend.model.net.checkpoint import load_decoder, read_config
from attend.model.parallel.shards import check_shards
from tests.model.checkpoints import edit_config, edit_tensors, tiny_config, write_checkpoint
from tests.model.net.test_qwen3_5 import same


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("lfm3", tmp_path)


def test_gates_of_heads_have_either_name(folder):
    """That of files, and that of the model in memory."""
    expected, tensors = load_decoder(folder, torch.float32, "cpu"), load_file(folder / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("layers.2.self_attn.gate_proj.weight")]
    changes = {name.replace(".", "__"): ..., name.replace("gate_proj", "g_proj").replace(".", "__"): tensors[name]}
    edit_tensors(folder, **changes)
    assert same(expected, load_decoder(folder, torch.float32, "cpu"))


DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
REFUSED: dict[str, dict[str, Any]] = {
    "layer_types must name conv or sliding_attention or full_attention": {"layer_types": ["conv"] * 5},
    "rope_parameters must have sliding_attention and full_attention": {"rope_parameters": {"full_attention": DEFAULT}},
    "rope_parameters must have": {"rope_parameters": DEFAULT},
    "RoPE scaling of sliding-window layers": {
        "rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT | {"rope_type": "linear", "factor": 2.0}}
    },
    "a share of 1.5": {
        "rope_parameters": {
            "sliding_attention": DEFAULT,
            "full_attention": DEFAULT | {"rope_type": "proportional", "partial_rotary_factor": 1.5},
        }
    },
}


@pytest.mark.parametrize(("named", "changes"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_built_is_refused_by_key(folder, named, changes):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=f"config.json: .*{re.escape(named)}"):
        read_config(folder)


def test_several_devices_do_not_share_gates_of_heads():
    check_shards(tiny_config(head_gate=True), 1)
    with pytest.raises(SettingError, match="tensor_parallel is 2, but gates of heads"):
        check_shards(tiny_config(head_gate=True), 2)
