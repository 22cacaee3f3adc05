"""What Qwen3.5's checkpoints bring beside a text model, and the spellings that they have."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder, read_config
from attend.model.net.transformer import Decoder
from tests.model.checkpoints import edit_config, edit_tensors, write_checkpoint


def same(ours: Decoder, other: Decoder) -> bool:
    pairs = zip(ours.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(tensor, copy) for (name, tensor), (again, copy) in pairs)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("qwen3_5", tmp_path)


def test_a_model_of_images_and_guesses_of_the_model_are_left_out_and_said_so(folder, caplog):
    edit_tensors(folder, mtp__fc__weight=torch.zeros(2, 2))
    with caplog.at_level(logging.INFO, "attend.model"):
        load_decoder(folder, torch.float32, "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "the tensors model.visual.* are left out: images and videos are not served",
        "the tensors mtp.* are left out: multi-token prediction (MTP) is not supported",
    ]
    inspect(folder)


@pytest.fixture(params=["qwen3_5", "gemma4"])
def beside(request, tmp_path) -> Path:
    """A text model beside one of images."""
    return write_checkpoint(request.param, tmp_path)


def test_a_text_model_may_keep_the_names_that_it_has_beside_images(beside, tmp_path_factory):
    """And the other way round."""
    whole, alone = load_decoder(beside, torch.float32, "cpu"), tmp_path_factory.mktemp("alone")
    raw = json.loads((beside / "config.json").read_text(encoding="utf-8"))
    (alone / "config.json").write_text(json.dumps(raw["text_config"]), encoding="utf-8")
    (alone / "model.safetensors").write_bytes((beside / "model.safetensors").read_bytes())
    assert same(whole, load_decoder(alone, torch.float32, "cpu"))
    tensors = load_file(beside / "model.safetensors")
    short = dict.fromkeys(tensors, ...) | {name.replace("language_model.", ""): part for name, part in tensors.items()}
    edit_tensors(beside, **{name.replace(".", "__"): part for name, part in short.items()})
    assert same(whole, load_decoder(beside, torch.float32, "cpu"))


def test_a_mixture_may_keep_all_experts_in_one_tensor(tmp_path):
    """As they are published."""
    whole = load_decoder(write_checkpoint("qwen3_5_moe", tmp_path), torch.float32, "cpu")
    changes = {}
    for layer, block in enumerate(whole.blocks):
        mine = f"model__language_model__layers__{layer}__mlp__experts"
        for name in load_file(tmp_path / "model.safetensors"):
            if name.startswith(mine.replace("__", ".") + "."):
                changes[name.replace(".", "__")] = ...
        changes[f"{mine}__gate_up_proj"] = block.mlp.experts.gate_up.weight
        changes[f"{mine}__down_proj"] = block.mlp.experts.down.weight
    edit_tensors(tmp_path, **changes)
    inspect(tmp_path)
    assert same(whole, load_decoder(tmp_path, torch.float32, "cpu"))
    edit_tensors(tmp_path, model__language_model__layers__1__mlp__experts__down_proj=...)
    with pytest.raises(CheckpointError, match=r"tensor model\.language_model\.layers\.1\.mlp\.experts\.down_proj is missing"):
        load_decoder(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("changes", "named"), [({"text_config": [1]}, "text_config"), ({"quantization_config": {}}, "quantiz")]
)
def test_keys_beside_the_text_model_count(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=named):
        read_config(folder)


def test_a_published_interval_says_which_layers_attend(folder):
    expected = read_config(folder)
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    edit_config(folder, text_config={key: value for key, value in text.items() if key != "layer_types"})
    assert read_config(folder) == expected
    assert expected.delta_layers == (0, 1, 2)
