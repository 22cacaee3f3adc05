"""FP8: a folder in floats of 8 bits is the plain one with the numbers that others find in it."""

import logging
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import load_decoder, read_config
from attend.model.net.formats.codes import FP8
from attend.model.net.formats.fp8 import dense
from attend.model.net.quantised import QuantisedLinear
from tests.model.checkpoints import DEEPSEEK, LATENT, edit_config, edit_tensors
from tests.model.net.formats.writing import Pack, Packed, assert_means, pack_folder, plain_folder

BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
ROWS: dict[str, Any] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
TENSORS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def fp8(shape: str, scale_name: str = ".weight_scale_inv", dtype: torch.dtype = torch.float32) -> Pack:
    """Scales of blocks of 64 x 128, of rows, or of the matrix; what `transformers` makes of them."""

    def pack(matrix: Tensor) -> Packed:
        rows, columns = matrix.shape
        sizes: dict[str, tuple[int, ...]] = {"blocks": (-(-rows // 64), -(-columns // 128)), "rows": (rows, 1)}
        sizes |= {"numbers": (rows,), "one": (1,), "none": ()}
        scale = (torch.rand(sizes[shape], generator=torch.Generator().manual_seed(rows)) * 0.01 + 0.001).to(dtype)
        weight = (matrix * 100).to(torch.float8_e4m3fn)
        theirs = scale[:, None] if scale.dim() == 1 and len(scale) > 1 else scale.reshape(1, 1) if scale.dim() < 2 else scale
        padded = (
            torch.zeros(-(-rows // 64) * 64, -(-columns // 128) * 128).to(weight.dtype) if shape == "blocks" else weight.clone()
        )
        padded[:rows, :columns] = weight
        numbers = Fp8Dequantize(None)._dequantize_one(padded, theirs, torch.float32)[:rows, :columns]
        return Packed({".weight": weight, scale_name: scale}, numbers)

    return pack


CASES: dict[str, tuple[Pack, dict[str, Any]]] = {
    "blocks": (fp8("blocks"), BLOCKS),
    "blocks with bfloat16 scales": (fp8("blocks", dtype=torch.bfloat16), BLOCKS),
    "blocks with powers of two": (fp8("blocks", dtype=torch.float8_e8m0fnu), BLOCKS),
    "rows": (fp8("rows", ".weight_scale"), ROWS),
    "rows in a list": (fp8("numbers", ".weight_scale"), ROWS),
    "matrices": (fp8("one", ".weight_scale"), TENSORS),
    "matrices without a dimension": (fp8("none", ".weight_scale"), TENSORS),
    "matrices under the blocks' name": (fp8("none"), TENSORS),
}


@pytest.mark.parametrize(("pack", "settings"), CASES.values(), ids=CASES)
def test_a_folder_is_the_plain_one_with_its_numbers_and_a_line_says_so(tmp_path, caplog, pack, settings):
    """Widths that blocks do not divide, too."""
    plain = plain_folder(tmp_path / "plain", intermediate_size=160)
    folder = pack_folder(plain, pack, settings)
    with caplog.at_level(logging.INFO, "attend.model"):
        assert_means(folder, plain, coded=False)
    assert len([record for record in caplog.records if "no CPU multiplies FP8" in record.message]) == 1


@pytest.mark.parametrize(
    ("pack", "settings"), [(fp8("blocks"), BLOCKS), (fp8("rows", ".weight_scale"), ROWS)], ids=["blocks", "rows"]
)
def test_the_floats_themselves_are_kept_where_they_are_multiplied(tmp_path, pack, settings):
    """Their scales have the 11 bits of float16. Half of bfloat16's memory, and half a bit a number beside."""
    plain = plain_folder(tmp_path / "plain", intermediate_size=160)
    folder = pack_folder(plain, pack, settings)
    kept, large = (
        load_decoder(folder, torch.float32, "cpu", keep_codes=True, keep_floats=True),
        load_decoder(plain, torch.float32, "cpu"),
    )
    forms = {name: module for name, module in kept.named_modules() if isinstance(module, QuantisedLinear)}
    assert {FP8} == {form.kind for form in forms.values()}
    assert len(forms) == 4 * len(kept.blocks)
    for name, form in forms.items():
        torch.testing.assert_close(form.dense(), large.get_submodule(name).weight, rtol=2**-11, atol=0)
        assert sum(part.nbytes for part in form.buffers()) <= 1.1 * form.codes.numel() + 4 * form.out_features


def test_latent_attention_and_its_mixtures_are_read_as_other_matrices(tmp_path):
    """DeepSeek-V3 is published so. What is absorbed is dequantised where the others keep their floats."""
    sizes = {"hidden_size": 160, "kv_lora_rank": 40, "moe_intermediate_size": 72}
    plain = plain_folder(tmp_path / "plain", "DeepseekV3", **LATENT | DEEPSEEK | sizes)
    folder = pack_folder(plain, fp8("blocks"), BLOCKS)
    assert_means(folder, plain, coded=False)
    kept = load_decoder(folder, torch.float32, "cpu", keep_codes=True, keep_floats=True).blocks[1]
    assert isinstance(kept.attention.kv_down, QuantisedLinear)
    assert not isinstance(kept.attention.kv_up, QuantisedLinear)


def test_a_float_that_is_no_number_is_refused(tmp_path):
    """Kept or not."""
    folder = pack_folder(plain_folder(tmp_path / "plain"), fp8("rows", ".weight_scale"), ROWS)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, path)
    for floats in (False, True):
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            load_decoder(folder, torch.float32, "cpu", keep_codes=True, keep_floats=floats)


def test_experts_in_one_tensor_have_blocks_each():
    weight = torch.randn(3, 96, 160).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 2)
    found = dense(weight, scale, (64, 128))
    for expert in range(3):
        assert torch.equal(found[expert], dense(weight[expert], scale[expert], (64, 128)))


NAME = "model.layers.1.mlp.down_proj"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"weight_scale_inv": ...}, f"tensor {NAME}.weight_scale_inv is missing"),
    "other blocks": ({"weight_scale_inv": torch.ones(4, 2)}, rf"{NAME}.weight_scale_inv has shape \[4, 2\], expected \[2, 2\]"),
    "whole scales": (
        {"weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
        f"{NAME}.weight_scale_inv is I32, expected one of F32",
    ),
    "a scale that is NaN": ({"weight_scale_inv": torch.full((2, 2), torch.nan)}, f"tensor {NAME}.weight holds NaN or infinity"),
    "a weight that is NaN": (
        {"weight": torch.full((128, 256), torch.nan).to(torch.float8_e4m3fn)},
        f"{NAME}.weight holds NaN or infinity",
    ),
    "other floats": ({"weight": torch.ones(128, 256).to(torch.float8_e5m2)}, f"{NAME}.weight is F8_E5M2, expected one of F32"),
    "another shape": (
        {"weight": torch.ones(128, 128).to(torch.float8_e4m3fn)},
        rf"{NAME}.weight has shape \[128, 128\], expected \[128, 256\]",
    ),
}


@pytest.mark.parametrize(("changes", "named"), BAD.values(), ids=BAD)
def test_a_damaged_folder_is_named(tmp_path, changes, named):
    folder = pack_folder(plain_folder(tmp_path / "plain"), fp8("blocks"), BLOCKS)
    edit_tensors(folder, **{f"{NAME}.{part}".replace(".", "__"): tensor for part, tensor in changes.items()})
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor .*{named}|{named}"):
        load_decoder(folder, torch.float32, "cpu")


def test_a_module_that_was_not_converted_is_plain(tmp_path):
    plain = plain_folder(tmp_path / "plain")
    folder = pack_folder(
        plain,
        fp8("blocks"),
        BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.1"]},
        lambda name, _: "layers.0" in name and "proj" in name,
    )
    assert {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()} == {
        "torch.float32",
        "torch.float8_e4m3fn",
    }
    assert_means(folder, plain, coded=False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size must be two numbers .*\[128\]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size must be two numbers"),
        ({"fmt": "e5m2"}, "FP8 in the format 'e5m2' is not supported; known: 'e4m3'"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(tmp_path, changes, named):
    folder = plain_folder(tmp_path / "plain")
    edit_config(folder, quantization_config=BLOCKS | changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: {named}"):
        read_config(folder)
