"""Configs of dense families whose values are not built are refused by their key."""

from typing import Any

import pytest

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import read_config
from tests.model.checkpoints import edit_config, write_checkpoint

SLIDES = ["sliding_attention"] * 4
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("exaone4", {"sliding_window": None, "layer_types": SLIDES}, "layer_types name sliding layers, but there is no"),
    ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("ministral", {"sliding_window": None, "layer_types": SLIDES}, "layer_types name sliding layers, but there is no"),
    ("granite_swa", {"layer_rope_theta": [0.0]}, "layer_rope_theta must have a number for each of 4 layers"),
    ("granite_swa", {"layer_rope_theta": ["x"] * 4}, "layer_rope_theta must be a number"),
    ("granite_swa", {"layer_rope_theta": [-1.0] * 4}, "rope_thetas must be 4 numbers from 0"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "original_max_position"),
    ("hunyuan_v1_dense", {"head_dim": ...}, "head_dim"),
    ("hunyuan_v1_dense-alpha", {"rope_parameters": {"rope_type": "dynamic", "alpha": -2.0, "factor": 1.0}}, "alpha"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("stablelm", {"head_dim": 16}, "head_dim"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
]


@pytest.mark.parametrize(("kind", "changes", "named"), REFUSED, ids=str)
def test_arithmetic_that_is_not_built_is_refused_by_key(kind, changes, named, tmp_path):
    edit_config(write_checkpoint(kind, tmp_path), **changes)
    with pytest.raises(CheckpointError, match=f"config.json.*{named}"):
        read_config(tmp_path)
