"""Text models inside of models of images: the names that their tensors have, their heads, and what is left out."""

import json
import logging
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder, read_config
from tests.model.checkpoints import edit_config, edit_tensors, their_logits, their_model, write_checkpoint
from tests.model.net.test_qwen3_5 import same

WRAPPED = ("gemma3", "mistral3", "mistral3-scaled", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "muse_glimmer")
PREFIX = "model.language_model."
WHOLE = "with the text model whole"
SPELLINGS = {
    "today's": (PREFIX, "lm_head."),
    WHOLE: ("language_model.model.", "language_model.lm_head."),
    "of the first Qwen2-VL": ("model.", "lm_head."),
    "without a head": ("language_model.", "lm_head."),
}


def respell(folder: Path, prefix: str, head: str) -> None:
    """Give the tensors of a checkpoint other names."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs in (PREFIX, "language_model.model."):
            if name.startswith(theirs):
                name = prefix + name.removeprefix(theirs)
                break
        tensors[head + name.rpartition("lm_head.")[2] if "lm_head." in name else name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "spelling"),
    # No files of Qwen2-VL have the text model whole.
    [each for each in product(("gemma3", "mistral3", "qwen2_vl"), SPELLINGS) if each != ("qwen2_vl", WHOLE)],
)
def test_a_text_model_is_found_under_each_of_its_names(kind, spelling, tmp_path):
    wanted = load_decoder(write_checkpoint(kind, tmp_path), torch.float32, "cpu")
    respell(tmp_path, *SPELLINGS[spelling])
    inspect(tmp_path)
    assert same(wanted, load_decoder(tmp_path, torch.float32, "cpu"))


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_is_left_out_is_said(kind, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "attend.model"):
        load_decoder(write_checkpoint(kind, tmp_path), torch.float32, "cpu")
    told = [record.getMessage() for record in caplog.records]
    assert told and all(each.startswith("the tensors ") and each.endswith("images and videos are not served") for each in told)


@pytest.mark.parametrize("kind", WRAPPED)
def test_another_strange_tensor_is_named(kind, tmp_path):
    edit_tensors(write_checkpoint(kind, tmp_path), model__hearing__weight=torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match=r"tensor model\.hearing\.weight is unexpected"):
        load_decoder(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("kind", ["mistral3", "mistral3-scaled"])
def test_where_nothing_is_said_of_a_head_the_files_decide(kind, tmp_path):
    """Mistral Small 3.1 says nothing, and has one; `transformers` then ties none either."""
    edit_config(write_checkpoint(kind, tmp_path), tie_word_embeddings=...)
    net = load_decoder(tmp_path, torch.float32, "cpu")
    assert net.config.tied_head == (kind == "mistral3-scaled")
    tokens = list(range(3, 40))
    theirs = their_logits(their_model(tmp_path), tokens)
    torch.testing.assert_close(their_logits_of(net, tokens), theirs, atol=1e-4, rtol=0)


def their_logits_of(net, tokens):
    from attend.model.train.loss import hidden_states

    return net.logits(hidden_states(net, torch.tensor([tokens])))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_keys_of_the_text_model_may_stand_beside_those_of_images(kind, tmp_path):
    """As the first configs have them, with a rope of another name."""
    wanted = read_config(write_checkpoint(kind, tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    text = {key: value for key, value in raw.pop("text_config").items() if key not in ("model_type", "rope_parameters")}
    rope = {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(text | raw | rope), encoding="utf-8")
    assert read_config(tmp_path) == wanted


def test_a_mixture_may_keep_its_experts_as_they_are_published(tmp_path):
    """As [in, out], where `transformers` writes [out, in]."""
    wanted = load_decoder(write_checkpoint("qwen3_vl_moe", tmp_path), torch.float32, "cpu")
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in tensors.items()}
    assert turned.keys() == tensors.keys() and any(tensor.shape != tensors[name].shape for name, tensor in turned.items())
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inspect(tmp_path)
    assert same(wanted, load_decoder(tmp_path, torch.float32, "cpu"))


def test_a_mixture_may_have_a_tensor_for_each_expert(tmp_path):
    """As those who quantise it write it."""
    wanted = load_decoder(write_checkpoint("qwen3_vl_moe", tmp_path), torch.float32, "cpu")
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        start, mark, part = name.partition(".experts.")
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert, own in enumerate(tensor if mark else ()):
            pieces = zip(names, own.chunk(len(names)), strict=True)
            tensors |= {f"{start}.experts.{expert}.{each}.weight": piece.contiguous() for each, piece in pieces}
        tensors |= {} if mark else {name: tensor}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inspect(tmp_path)
    assert same(wanted, load_decoder(tmp_path, torch.float32, "cpu"))
