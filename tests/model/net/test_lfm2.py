"""The keys of LFM2's config.json, in both spellings, and what is refused of them."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import read_config
from attend.model.net.families.table import FAMILIES
from tests.model.checkpoints import edit_config, write_checkpoint


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


def test_an_absent_key_means_what_it_means_to_transformers(folder):
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    theirs = Lfm2Config()
    ours = FAMILIES["lfm2"].read({"model_type": "lfm2", "full_attn_idxs": [3]} | {key: getattr(theirs, key) for key in needed})
    assert (ours.num_kv_heads, ours.norm_eps, ours.tied_head) == (8, theirs.norm_eps, theirs.tie_word_embeddings)
    assert (ours.conv_kernel, ours.conv_bias) == (theirs.conv_L_cache, theirs.conv_bias)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.conv_layers == tuple(layer for layer in range(32) if layer != 3)


@pytest.mark.parametrize("changes", [{"tie_embedding": False}, {"tie_embedding": False, "tie_word_embeddings": True}], ids=str)
def test_the_published_key_of_a_tied_head_wins(folder, changes):
    edit_config(folder, **changes)
    assert not read_config(folder).tied_head


REFUSED: dict[str, dict[str, Any]] = {
    "layer_types must name conv or full_attention for each of 4 layers": {"layer_types": ["conv", "full_attention"]},
    "layer_types": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    "a recurrent state in every layer": {"layer_types": ["conv"] * 4},
    "conv_L_cache": {"conv_L_cache": 0},
    "conv_kernel above 1": {"conv_L_cache": 1},
    "conv_bias": {"conv_bias": "yes"},
    "tie_embedding": {"tie_embedding": "yes"},
    "block_ffn_dim_multiplier": {"block_ffn_dim_multiplier": "1.0"},
    "block_multiple_of": {"block_multiple_of": 0},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(("named", "changes"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_built_is_refused_by_key(folder, named, changes):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=f"config.json: .*{re.escape(named)}"):
        read_config(folder)
