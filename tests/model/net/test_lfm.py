"""The keys of LFM2's config.json, in both spellings, and the spellings of LFM3's tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from attend.model.errors import SettingError
from attend.model.net.checkpoint import load_decoder, read_config
from attend.model.parallel.shards import check_shards
from tests.model.checkpoints import edit_config, edit_tensors, tiny_config, write_checkpoint
from tests.model.net.test_qwen3_5 import same


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("lfm2", tmp_path)


WIDTHS: list[dict[str, Any]] = [
    {},
    {"block_ff_dim": 100},
    {"block_ff_dim": 100, "intermediate_size": ...},
    {"block_auto_adjust_ff_dim": False},
    {"block_auto_adjust_ff_dim": False, "block_ff_dim": 100},
    {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 7},
    {"block_ffn_dim_multiplier": 2, "block_multiple_of": 1},
    {"block_ffn_dim_multiplier": ..., "block_multiple_of": ..., "block_auto_adjust_ff_dim": ...},
    {"intermediate_size": ...},
]


@pytest.mark.parametrize("changes", WIDTHS, ids=str)
def test_the_width_of_the_mlp_is_that_of_transformers(folder, changes):
    edit_config(folder, **changes)
    assert read_config(folder).mlp_size == Lfm2MLP(AutoConfig.from_pretrained(folder)).w1.out_features


@pytest.mark.parametrize("changes", [{"tie_embedding": False}, {"tie_embedding": False, "tie_word_embeddings": True}], ids=str)
def test_the_published_key_of_a_tied_head_wins(folder, changes):
    edit_config(folder, **changes)
    assert not read_config(folder).tied_head


def test_gates_of_heads_have_either_name(tmp_path):
    """That of files, and that of the model in memory."""
    folder = write_checkpoint("lfm3", tmp_path)
    expected, tensors = load_decoder(folder, torch.float32, "cpu"), load_file(folder / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("layers.2.self_attn.gate_proj.weight")]
    changes = {name.replace(".", "__"): ..., name.replace("gate_proj", "g_proj").replace(".", "__"): tensors[name]}
    edit_tensors(folder, **changes)
    assert same(expected, load_decoder(folder, torch.float32, "cpu"))


def test_several_devices_do_not_share_gates_of_heads():
    check_shards(tiny_config(head_gate=True), 1)
    with pytest.raises(SettingError, match="tensor_parallel is 2, but gates of heads"):
        check_shards(tiny_config(head_gate=True), 2)
