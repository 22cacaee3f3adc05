"""compressed-tensors: what the package itself writes is read with the numbers that it finds in it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import load_decoder, read_config
from attend.model.net.formats.codes import INT4, INT8, MXFP4
from attend.model.net.quantised import QuantisedLinear
from tests.model.checkpoints import edit_config, edit_tensors, shaped, spread
from tests.model.net.formats.writing import (
    SIZES,
    Pack,
    Packed,
    assert_codes_mean,
    assert_means,
    is_matrix,
    logits,
    pack_folder,
    plain_folder,
)

SCALES = {"group": lambda rows, columns: (rows, columns // 64), "channel": lambda rows, columns: (rows, 1)}
SCALES |= {"tensor": lambda rows, columns: (1,), "block": lambda rows, columns: (-(-rows // 96), -(-columns // 128))}


def args(bits: int, strategy: str, *, symmetric: bool = True, kind: str = "int", **more: Any) -> dict[str, Any]:
    """`weights` of a group of config.json."""
    extra = {"group": {"group_size": 64}, "block": {"block_structure": [96, 128]}}.get(strategy, {})
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy} | extra | more


def settings(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """`quantization_config`."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": layout}
    common = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return common | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | more


def compressed(layout: str, weights: dict[str, Any], *, dtype: torch.dtype = torch.float16, fine: bool = True) -> Pack:
    """By the package's compressor, and what its decompressor makes of it in float32. Scales and zeros are drawn.

    Unless they are `fine`, scales have so few bits that float16 holds zero points times scales, too.
    """
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    writer = BaseCompressor.get_value_from_registry(layout)

    def pack(matrix: Tensor) -> Packed:
        dice, shape = torch.Generator().manual_seed(7), SCALES[weights["strategy"]](*matrix.shape)
        scale = torch.rand(shape, generator=dice) * 0.5 + 0.5
        scale = (scale * 4).round() / 4 if not fine else scale
        scale = (scale / (1 << weights["num_bits"] - 1)).to(dtype)
        zeros = torch.randint(-(1 << weights["num_bits"] - 1), 1 << weights["num_bits"] - 1, shape, generator=dice)
        state = {"weight": matrix.to(dtype), "weight_scale": scale}
        if not weights["symmetric"]:
            state["weight_zero_point"] = zeros.to(torch.int8)
        written = writer.compress(state, scheme)
        read = writer.decompress(written | {"weight_scale": scale.float()}, scheme)["weight"]
        return Packed({f".{name}": tensor for name, tensor in written.items()}, read)

    return pack


CODES = {
    "4 bits in groups": ("pack-quantized", args(4, "group"), INT4),
    "4 bits in groups, with zeros": ("pack-quantized", args(4, "group", symmetric=False), INT4),
    "4 bits of rows, with zeros": ("pack-quantized", args(4, "channel", symmetric=False), INT4),
    "4 bits, columns sorted while they were chosen": ("pack-quantized", args(4, "group", actorder="weight"), INT4),
    "8 bits in groups": ("pack-quantized", args(8, "group"), INT8),
    "8 bits in groups, with zeros": ("pack-quantized", args(8, "group", symmetric=False), INT8),
    "bytes of rows": ("int-quantized", args(8, "channel"), INT8),
    "bytes of rows, with zeros": ("int-quantized", args(8, "channel", symmetric=False), INT8),
    "bytes of matrices": ("int-quantized", args(8, "tensor"), INT8),
    "bytes in groups": ("int-quantized", args(8, "group"), INT8),
    "naive bytes": ("naive-quantized", args(8, "channel"), INT8),
}


@pytest.mark.parametrize(("layout", "weights", "kind"), CODES.values(), ids=CODES)
def test_integers_are_read_as_they_were_written(tmp_path, layout, weights, kind):
    plain = plain_folder(tmp_path / "plain")
    folder = pack_folder(plain, compressed(layout, weights, fine=weights["symmetric"]), settings(layout, weights))
    assert_codes_mean(folder, plain)
    net = assert_means(folder, plain)
    forms = [module for module in net.modules() if isinstance(module, QuantisedLinear)]
    assert len(forms) == 8
    assert {(form.kind, form.has_minima) for form in forms} == {(kind, not weights["symmetric"])}


FLOATS = {
    "of rows": ("float-quantized", args(8, "channel", kind="float")),
    "of matrices": ("float-quantized", args(8, "tensor", kind="float")),
    "of blocks": ("float-quantized", args(8, "block", kind="float")),
    "naive": ("naive-quantized", args(8, "tensor", kind="float")),
}


@pytest.mark.parametrize(("layout", "weights"), FLOATS.values(), ids=FLOATS)
def test_floats_of_8_bits_become_plain_numbers_and_a_line_says_so(tmp_path, caplog, layout, weights):
    plain = plain_folder(tmp_path / "plain")
    folder = pack_folder(plain, compressed(layout, weights), settings(layout, weights))
    with caplog.at_level(logging.INFO, "attend.model"):
        assert_means(folder, plain, coded=False)
    told = [record.message for record in caplog.records if "no CPU multiplies FP8" in record.message]
    assert len(told) == 1


def test_floats_of_4_bits_with_powers_of_two_are_kept(tmp_path):
    weights = args(4, "group", kind="float") | {"group_size": 32, "scale_dtype": "torch.uint8"}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    writer = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")

    def pack(matrix: Tensor) -> Packed:
        powers = torch.arange(matrix.numel() // 32).view(len(matrix), -1) % 4 - 4
        written = writer.compress({"weight": matrix, "weight_scale": torch.ldexp(torch.ones(powers.shape), powers)}, scheme)
        return Packed(
            {f".{name}": tensor for name, tensor in written.items()}, writer.decompress(written, scheme)["weight"].float()
        )

    plain = plain_folder(tmp_path / "plain")
    folder = pack_folder(plain, pack, settings("mxfp4-pack-quantized", weights))
    net = assert_means(folder, plain)
    assert net.blocks[0].mlp.down.kind == MXFP4


def test_a_model_that_the_package_compressed_and_transformers_saved_is_read(tmp_path):
    """Bytes in the first layer's MLP, 4 bits elsewhere, and two modules that are ignored, one of them by an expression."""
    torch.manual_seed(3)
    net = shaped("Llama", **SIZES, tie_word_embeddings=False)
    spread(net)
    groups = {
        "group_0": {"targets": ["Linear"], "weights": args(4, "group", symmetric=False)},
        "group_1": {
            "targets": [r"re:.*layers\.0\.mlp\..*"],
            "weights": args(8, "channel"),
            "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
        },
    }
    ignore = ["lm_head", r"re:.*self_attn\.o_proj$"]
    apply_quantization_config(net, QuantizationConfig(config_groups=groups, ignore=ignore), show_progress=False)
    dice = torch.Generator().manual_seed(7)
    for module in net.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = torch.rand(module.weight_scale.shape, generator=dice) * 0.1 + 0.05
            module.weight_zero_point.data.random_(-8, 8, generator=dice)
    writer = ModelCompressor.from_pretrained_model(net)
    writer.compress_model(net)
    net.save_pretrained(tmp_path / "packed")
    writer.update_config(str(tmp_path / "packed"))
    writer.decompress_model(net)
    numbers = {
        name: tensor for name, tensor in net.state_dict().items() if not name.endswith(("_scale", "_zero_point", "_shape"))
    }
    transformers.LlamaConfig(**net.config.to_dict() | {"quantization_config": None}).save_pretrained(tmp_path / "plain")
    edit_config(tmp_path / "plain", quantization_config=...)
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, tmp_path / "plain" / "model.safetensors")
    small, large = (load_decoder(tmp_path / name, torch.float32, "cpu", keep_codes=True) for name in ("packed", "plain"))
    kinds = [getattr(matrix, "kind", None) for block in small.blocks for matrix in (block.attention.qkv, block.attention.out)]
    kinds += [getattr(matrix, "kind", None) for block in small.blocks for matrix in (block.mlp.gate_up, block.mlp.down)]
    assert kinds == [INT4, None, INT4, None, INT8, INT8, INT4, INT4]
    assert (logits(small) - logits(large)).abs().max() <= 3e-3 * logits(large).abs().max()


@pytest.fixture
def packed(tmp_path) -> Path:
    plain, weights = plain_folder(tmp_path / "plain"), args(4, "group", symmetric=False)
    return pack_folder(plain, compressed("pack-quantized", weights), settings("pack-quantized", weights))


def test_what_is_said_of_activations_and_of_the_cache_is_not_carried_out_and_a_line_says_so(tmp_path, caplog):
    plain, weights = plain_folder(tmp_path / "plain"), args(8, "channel")
    more = settings("int-quantized", weights, kv_cache_scheme={"num_bits": 8, "type": "float"})
    more["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False, "strategy": "tensor"}
    folder = pack_folder(plain, compressed("int-quantized", weights), more)
    before = logits(load_decoder(folder, torch.float32, "cpu", keep_codes=True))
    edit_tensors(
        folder,
        **{f"model__layers__0__self_attn__{part}": torch.ones(1) for part in ("k_scale", "v_scale", "q_proj__input_scale")},
    )
    with caplog.at_level(logging.INFO, "attend.model"):
        assert torch.equal(before, logits(load_decoder(folder, torch.float32, "cpu", keep_codes=True)))
    assert "the activation quantisation of config_groups is ignored" in caplog.text
    assert "kv_cache_scheme is ignored" in caplog.text


def test_a_config_may_name_modules_with_another_prefix_than_the_files(tmp_path):
    """A tuned model is saved without its head, and its config still has the names of the whole; or the other way round."""
    plain, weights = plain_folder(tmp_path / "plain"), args(8, "channel")
    ignore = ["layers.1.mlp.down_proj", r"re:model\.layers\.0\.self_attn"]

    def chosen(name: str, tensor: Tensor) -> bool:
        return is_matrix(name, tensor) and "layers.0.self_attn" not in name and "layers.1.mlp.down_proj" not in name

    folder = pack_folder(plain, compressed("int-quantized", weights), settings("int-quantized", weights, ignore=ignore), chosen)
    whole = assert_means(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(logits(whole), logits(load_decoder(folder, torch.float32, "cpu", keep_codes=True)))


NAME = "model.layers.1.mlp.down_proj"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"weight_scale": ...}, f"tensor {NAME}.weight_scale is missing"),
    "no zeros": ({"weight_zero_point": ...}, f"tensor {NAME}.weight_zero_point is missing"),
    "no shape": ({"weight_shape": ...}, f"tensor {NAME}.weight_shape is missing"),
    "no codes": ({"weight_packed": ...}, f"tensor {NAME}.weight_packed is missing"),
    "another shape": (
        {"weight_shape": torch.tensor([128, 255])},
        rf"model.safetensors: tensor {NAME}.weight_packed: its weight_shape is \[128, 255\], expected \[128, 256\]",
    ),
    "codes in bytes": (
        {"weight_packed": torch.zeros(128, 32, dtype=torch.int8)},
        f"{NAME}.weight_packed is I8, expected one of I32",
    ),
    "too few scales": ({"weight_scale": torch.ones(128, 2)}, rf"{NAME}.weight_scale has shape \[128, 2\], expected \[128, 4\]"),
    "scales of NaN": ({"weight_scale": torch.full((128, 4), torch.nan)}, f"tensor {NAME}.weight_packed holds NaN or infinity"),
    "sorted columns": (
        {"weight_g_idx": torch.arange(256, dtype=torch.int32).flip(0).contiguous() // 64},
        rf"tensor {NAME}.weight_packed: its columns were sorted .*\(act-order\)",
    ),
}


@pytest.mark.parametrize(("changes", "named"), BAD.values(), ids=BAD)
def test_a_damaged_folder_is_named(packed, changes, named):
    edit_tensors(packed, **{f"{NAME}.{part}".replace(".", "__"): tensor for part, tensor in changes.items()})
    with pytest.raises(CheckpointError, match=named):
        load_decoder(packed, torch.float32, "cpu", keep_codes=True)


GROUP = args(4, "group")
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": (
        settings("nvfp4-pack-quantized", args(4, "tensor_group", kind="float", group_size=16)),
        "'nvfp4-pack-quantized' is not supp",
    ),
    "sparse": (
        settings("marlin-24", GROUP),
        "'marlin-24' is not supported; known: pack-quantized, int-quantized, float-quantized",
    ),
    "3 bits": (settings("pack-quantized", GROUP | {"num_bits": 3}), "weights of 3 bits are not supported; known: 4, 8"),
    "act-order": (settings("pack-quantized", GROUP | {"actorder": "group"}), "columns were sorted .*'group'.* not supported"),
    "groups of 16": (settings("pack-quantized", GROUP | {"group_size": 16}), "groups of 16 columns are not supported"),
    "floats in groups": (
        settings("float-quantized", args(8, "group", kind="float")),
        "float-quantized weights in groups are not",
    ),
    "bytes in blocks": (
        settings("int-quantized", args(8, "block")),
        r"blocks \[96, 128\] of int-quantized weights are not supported",
    ),
    "sparsity": (
        settings("pack-quantized", GROUP, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config is not supported",
    ),
    "rotations": (
        settings("pack-quantized", GROUP, transform_config={"config_groups": {"u": {}}}),
        "transform_config is not supported",
    ),
    "no groups": (settings("pack-quantized", GROUP, config_groups={}), "config_groups must be an object of groups"),
    "a bad expression": (
        settings("pack-quantized", GROUP, ignore=["re:("]),
        r"ignore has 're:\(', which is no regular expression",
    ),
    "a list of numbers": (settings("pack-quantized", GROUP, ignore=[1]), "ignore must be a list of names"),
}


@pytest.mark.parametrize(("raw", "named"), SETTINGS.values(), ids=SETTINGS)
def test_what_is_not_read_is_refused_by_name(tmp_path, raw, named):
    folder = plain_folder(tmp_path / "plain")
    edit_config(folder, quantization_config=json.loads(json.dumps(raw)))
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: .*{named}"):
        read_config(folder)
