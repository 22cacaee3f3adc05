"""MXFP4: every number of it is read exactly, and a folder that holds it is the folder that holds the same in plain floats."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model.errors import CheckpointError
from model.net import mxfp4
from model.net.checkpoint import inspect, load, read_config
from model.net.transformer import Decoder
from model.train.loss import hidden_states
from tests.model.checkpoints import edit_config, edit_tensors, their_logits, their_model

SHAPE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": 7, "pad_token_id": 0}
SHAPE |= {"num_local_experts": 3, "num_experts_per_tok": 2}
TOKENS = [5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12]
NAMES = [f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in range(2) for part in ("gate_up", "down")]


def test_every_byte_and_every_exponent_is_the_number_of_the_standard():
    """All 256 bytes beside all exponents, against the bits read one by one: sign, two of exponent, one of mantissa."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    found = mxfp4.unpack(blocks, scales)

    def number(code: int) -> float:
        size = (code & 1) / 2 if code & 6 == 0 else (1 + (code & 1) / 2) * 2.0 ** ((code >> 1 & 3) - 1)
        return -size if code & 8 else size

    plain = [value for byte in range(256) for value in (number(byte & 15), number(byte >> 4))]
    expected = torch.tensor(plain, dtype=torch.float64) * 2.0 ** (torch.arange(255, dtype=torch.float64)[:, None] - 127)
    # 4 and 6 times the largest power leave bfloat16, as they leave float32
    assert torch.equal(found[0].double(), expected.float().bfloat16().double())
    within = expected.abs() < torch.finfo(torch.bfloat16).max
    assert within.float().mean() > 0.99 and torch.equal(found[0].double()[within], expected[within])


def test_an_exponent_of_255_is_no_number():
    blocks = torch.full((1, 1, 1, 16), 0x22, dtype=torch.uint8)
    assert mxfp4.unpack(blocks, torch.tensor([[[255]]], dtype=torch.uint8)).isnan().all()


def packed() -> dict[str, Tensor]:
    """Random blocks and exponents of the experts' matrices; by name."""
    generator, tensors = torch.Generator().manual_seed(4), {}
    for name in NAMES:
        shape = (3, 64, 2, 16) if "gate_up" in name else (3, 64, 1, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, shape[:-1], generator=generator, dtype=torch.uint8)
    return tensors


@pytest.fixture
def plain(tmp_path) -> Path:
    """A checkpoint of gpt-oss whose experts are what `transformers` reads in those blocks."""
    torch.manual_seed(4)
    net = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SHAPE))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0.0, 0.3)
    folder = tmp_path / "plain"
    net.save_pretrained(folder)
    parts = packed()
    theirs = {n: convert_moe_packed_tensors(parts[f"{n}_blocks"], parts[f"{n}_scales"], dtype=torch.float32) for n in NAMES}
    save_file(load_file(folder / "model.safetensors") | theirs, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(plain) -> Path:
    """The same, its experts in MXFP4."""
    folder = plain.with_name("packed")
    copytree(plain, folder)
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name not in NAMES}
    save_file(tensors | packed(), folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def logits(net: Decoder) -> Tensor:
    return net.logits(hidden_states(net, torch.tensor([TOKENS])))


def test_a_packed_folder_is_the_plain_one_to_the_bit(folder, plain):
    found, expected = load(folder, torch.float32, "cpu"), load(plain, torch.float32, "cpu")
    assert found.config == expected.config == inspect(folder)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name
    theirs = their_logits(their_model(plain), TOKENS)
    assert (logits(found) - theirs).abs().max() <= 2e-4 * theirs.abs().max()


def test_a_packed_folder_is_loaded_in_the_dtype_asked_for(folder):
    """And bfloat16 holds the experts exactly."""
    small, large = load(folder, torch.bfloat16, "cpu"), load(folder, torch.float32, "cpu")
    assert {torch.bfloat16} == {parameter.dtype for parameter in small.parameters()}
    for name, parameter in small.named_parameters():
        if ".experts." in name and name.endswith("weight"):
            assert torch.equal(parameter.float(), large.get_parameter(name))


BLOCKS, SCALES = f"{NAMES[0]}_blocks", f"{NAMES[0]}_scales"
BAD = {
    "no scales": ({SCALES: ...}, f"tensor {SCALES} is missing"),
    "floats": ({SCALES: torch.ones(3, 64, 2)}, f"tensor {SCALES} is F32, expected one of U8"),
    "other shape": (
        {BLOCKS: torch.ones(3, 64, 1, 16, dtype=torch.uint8)},
        rf"tensor {BLOCKS} has shape \[3, 64, 1, 16\], expected \[3, 64, 2, 16\]",
    ),
    "no number": ({SCALES: torch.full((3, 64, 2), 255, dtype=torch.uint8)}, f"tensor {BLOCKS} holds NaN or infinity"),
    "both forms": ({NAMES[0]: torch.ones(3, 64, 64)}, f"tensor {NAMES[0]}_.* is unexpected"),
}


@pytest.mark.parametrize(("changes", "named"), BAD.values(), ids=BAD)
def test_a_damaged_packed_folder_is_named(folder, changes, named):
    edit_tensors(folder, **{key.replace(".", "__"): value for key, value in changes.items()})
    with pytest.raises(CheckpointError, match=named):
        load(folder, torch.float32, "cpu")


def test_another_quantised_form_is_refused_by_name(folder):
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config .*fp8.* is not supported; known: .*mxfp4"):
        read_config(folder)
