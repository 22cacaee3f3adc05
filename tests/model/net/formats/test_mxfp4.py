"""MXFP4: every number of it is read exactly, and a folder that holds it is the folder that holds the same in plain floats."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder, quantised_decoder
from attend.model.net.formats.codes import MXFP4
from attend.model.net.formats.mxfp4 import codes_of
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedExperts
from attend.model.net.transformer import Decoder
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import edit_config, edit_tensors, their_logits, their_model
from tests.model.net.test_linear import filling

SHAPE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": 7, "pad_token_id": 0}
SHAPE |= {"num_local_experts": 3, "num_experts_per_tok": 2}
TOKENS = [5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12]
NAMES = [f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in range(2) for part in ("gate_up", "down")]


def test_every_byte_and_every_exponent_is_the_number_of_the_standard():
    """All 256 bytes beside all exponents, against the bits read one by one: sign, two of exponent, one of mantissa."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(255, 256)
    exponents = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(255, 16)
    found = codes_of(bytes_, exponents).dense()

    def number(code: int) -> float:
        size = (code & 1) / 2 if code & 6 == 0 else (1 + (code & 1) / 2) * 2.0 ** ((code >> 1 & 3) - 1)
        return -size if code & 8 else size

    plain = [value for byte in range(256) for value in (number(byte & 15), number(byte >> 4))]
    expected = torch.tensor(plain, dtype=torch.float64) * 2.0 ** (torch.arange(255, dtype=torch.float64)[:, None] - 127)
    # 4 and 6 times the largest power leave float32
    assert torch.equal(found.double(), expected.float().double())
    within = expected.abs() < torch.finfo(torch.float32).max
    assert within.float().mean() > 0.99 and torch.equal(found.double()[within], expected[within])


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
    found, expected = (load_decoder(each, torch.float32, "cpu", keep_codes=True) for each in (folder, plain))
    assert found.config == expected.config == inspect(folder)
    experts = [matrix for block in found.blocks for matrix in (block.mlp.experts.gate_up, block.mlp.experts.down)]
    assert all(isinstance(matrix, QuantisedExperts) and matrix.kind == MXFP4 and not matrix.has_minima for matrix in experts)
    for name, module in expected.named_modules():
        if isinstance(module, Linear):
            assert torch.equal(module.weight, found.get_submodule(name).dense()), name
    theirs = their_logits(their_model(plain), TOKENS)
    assert (logits(found) - theirs).abs().max() <= 2e-4 * theirs.abs().max()


def test_experts_are_filled_one_by_one(folder, plain):
    """What is owned beside the decoder is less than one expert in float32, however many there are."""
    net = quantised_decoder(folder)
    owned, beside = filling(net, folder)
    assert owned < 0.7 * filling(quantised_decoder(plain), plain)[0]
    assert beside < 4 * 64 * 64, beside


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
        load_decoder(folder, torch.float32, "cpu")
