"""The spellings of LFM3's tensors, and what is refused of its config.json."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attend.model.errors import SettingError
from attend.model.net.checkpoint import load_decoder
from attend.model.parallel.shards import check_shards
from tests.model.checkpoints import edit_tensors, tiny_config, write_checkpoint
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


def test_several_devices_do_not_share_gates_of_heads():
    check_shards(tiny_config(head_gate=True), 1)
    with pytest.raises(SettingError, match="tensor_parallel is 2, but gates of heads"):
        check_shards(tiny_config(head_gate=True), 2)
