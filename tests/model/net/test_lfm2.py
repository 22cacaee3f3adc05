"""The keys of LFM2's config.json, in both spellings, and what is refused of them."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from attend.model.net.checkpoint import read_config
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


@pytest.mark.parametrize("changes", [{"tie_embedding": False}, {"tie_embedding": False, "tie_word_embeddings": True}], ids=str)
def test_the_published_key_of_a_tied_head_wins(folder, changes):
    edit_config(folder, **changes)
    assert not read_config(folder).tied_head
