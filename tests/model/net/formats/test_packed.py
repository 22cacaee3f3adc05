"""AWQ and GPTQ: a folder that holds codes is the plain folder with the numbers they stand for, in memory too."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from safetensors.torch import load_file
from torch import Tensor

from attend.model.errors import CheckpointError, SettingError
from attend.model.net.checkpoint import inspect, load_decoder, quantised_decoder, read_config
from attend.model.net.formats.codes import INT4, INT8, MXFP4, CodeLayout
from attend.model.net.linear import Linear
from attend.model.net.quantised import QuantisedEmbedding, QuantisedLinear
from tests.model.checkpoints import edit_config, edit_tensors, spread
from tests.model.net.formats.writing import (
    AWQ,
    GPTQ,
    Pack,
    Packed,
    assert_codes_mean,
    assert_means,
    awq,
    codes_of,
    gptq,
    is_matrix,
    logits,
    pack_folder,
    plain_folder,
)
from tests.model.net.test_linear import filling

LAYOUTS: dict[str, tuple[Pack, dict[str, Any]]] = {
    **{f"awq {group}": (awq(group), AWQ | {"group_size": group}) for group in (32, 64, 128, -1)},
    "awq whose zeros are all 8": (awq(64, zeros=False), AWQ | {"group_size": 64}),
    "awq under its old names": (awq(64), {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}),
    **{
        f"gptq {bits} bits {group} version {version}": (
            gptq(bits, group, version=version),
            GPTQ | {"bits": bits, "group_size": group, "checkpoint_format": ("gptq", "gptq_v2")[version - 1]},
        )
        for bits, group, version in [(4, 128, 1), (4, 32, 2), (4, -1, 1), (8, 128, 1), (8, -1, 2)]
    },
    "gptq symmetric": (gptq(4, 128, zeros=False), GPTQ | {"bits": 4, "group_size": 128, "sym": True}),
    "gptq 8 bits symmetric": (gptq(8, 32, zeros=False), GPTQ | {"bits": 8, "group_size": 32, "sym": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_folder_is_the_plain_one_with_its_numbers(tmp_path, layout):
    pack, settings = LAYOUTS[layout]
    plain = plain_folder(tmp_path / "plain")
    folder = pack_folder(plain, pack, settings)
    assert_codes_mean(folder, plain)
    symmetric = "symmetric" in layout or "all 8" in layout
    net = assert_means(folder, plain)
    forms = [module for module in net.modules() if isinstance(module, QuantisedLinear)]
    assert len(forms) == 8
    assert {form.kind for form in forms} == {INT8 if "8 bits" in layout else INT4}
    assert {form.has_minima for form in forms} == {not symmetric}
    assert inspect(folder) == inspect(plain)


def test_another_reader_finds_the_same_awq_numbers(tmp_path):
    folder = pack_folder(plain_folder(tmp_path / "plain"), awq(32), AWQ | {"group_size": 32})
    name = "model.layers.0.mlp.down_proj"
    parts = {part: load_file(folder / "model.safetensors")[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros")}
    found = AutoAWQConverter(group_size=32).process({f"{name}.{part}": tensor for part, tensor in parts.items()})
    values = unpack_from_int32(found[f"{name}.weight_packed"], 4, (128, 256))
    zeros = unpack_from_int32(found[f"{name}.weight_zero_point"], 4, (128, 8), packed_dim=0)
    theirs = (values - zeros.repeat_interleave(32, 1)) * found[f"{name}.weight_scale"].double().repeat_interleave(32, 1)
    assert torch.equal(codes_of(folder, f"{name}.weight", (128, 256)).dense(), theirs.float())


DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("Qwen2", {}),
    "a tied head": ("Qwen3", {"tie_word_embeddings": True}),
    "rows in another order": ("GPTNeoX", {}),
    "rows in pairs": ("Glm4", {}),
    "one matrix for queries, keys and values": ("Phi3", {}),
    "gates between the rows": ("Qwen3_5Text", DELTA | {"num_hidden_layers": 4}),
    "experts": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "experts and a shared one": ("Qwen2Moe", MIXTURE),
}


def in_blocks(name: str, tensor: Tensor) -> bool:
    """What words of 32 bits can hold."""
    return is_matrix(name, tensor) and len(tensor) % 8 == 0 and tensor.shape[1] % 32 == 0


@pytest.mark.parametrize(("family", "more"), FAMILIES.values(), ids=FAMILIES)
def test_so_it_is_for_families_whose_matrices_lie_otherwise(tmp_path, family, more):
    plain = plain_folder(tmp_path / "plain", family, **more)
    folder = pack_folder(plain, gptq(4, 32, zeros=False), GPTQ | {"bits": 4, "group_size": 32}, in_blocks)
    assert_means(folder, plain)


def test_matrices_that_lie_the_other_way_are_packed_rows_first(tmp_path):
    plain = tmp_path / "plain"
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    net = transformers.GPT2LMHeadModel(config)
    spread(net)
    net.save_pretrained(plain)
    assert_means(pack_folder(plain, gptq(8, 64, zeros=False), GPTQ | {"bits": 8, "group_size": 64}, turned=True), plain)


def folder_of(tmp_path: Path, *packs: Pack) -> tuple[Path, Path]:
    """The queries' matrices with the first pack, the keys' with the second, and so on, all others plain; and what they mean."""
    plain = plain_folder(tmp_path / "plain")
    which = iter(packs * 2)
    parts = [f".{part}_proj." for part in "qkv"][: len(packs)]
    order = {
        name: next(which) for layer in range(2) for name in (f"model.layers.{layer}.self_attn{part}weight" for part in parts)
    }
    packing = iter(load_file(plain / "model.safetensors"))

    def pack(matrix: Tensor) -> Packed:
        return order[next(name for name in packing if name in order)](matrix)

    return pack_folder(plain, pack, AWQ | {"group_size": 32}, lambda name, tensor: name in order), plain


def test_parts_that_only_sometimes_have_minima_share_a_matrix_that_has_them(tmp_path):
    net = assert_means(*folder_of(tmp_path, awq(32, zeros=False), awq(32), awq(32, zeros=False)))
    assert net.blocks[0].attention.qkv.has_minima and net.blocks[0].attention.qkv.kind == INT4


def test_a_matrix_with_one_plain_part_is_plain(tmp_path):
    folder, plain = folder_of(tmp_path, awq(32), awq(32))
    net = assert_means(folder, plain, coded=False)
    assert type(net.blocks[0].attention.qkv) is Linear


@pytest.mark.parametrize("forms", [(INT4, INT8), (MXFP4, INT4), (INT8, INT8)], ids=str)
def test_a_matrix_of_several_kinds_is_kept_in_bytes(forms):
    first, second = (CodeLayout(kind) for kind in forms)
    assert first.common_layout(second) == second.common_layout(first) == CodeLayout(INT8)
    assert first.common_layout(CodeLayout(forms[1], has_minima=True)) == CodeLayout(INT8, has_minima=True)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_a_head_of_codes_are_kept_as_such(tmp_path, tied):
    plain = plain_folder(tmp_path / "plain", tie_word_embeddings=tied)
    chosen = {"model.embed_tokens.weight", "lm_head.weight"}
    folder = pack_folder(plain, gptq(8, 32, zeros=False), GPTQ | {"bits": 8, "group_size": 32}, lambda name, _: name in chosen)
    net = assert_means(folder, plain)
    assert isinstance(net.embedding.tokens, QuantisedEmbedding) and isinstance(net.head, QuantisedLinear)
    assert (net.head.codes is net.embedding.tokens.codes) == tied


def test_a_bias_of_zeros_that_no_model_has_is_passed_over(packed):
    expected, name = logits(load_decoder(packed, torch.float32, "cpu", keep_codes=True)), "model.layers.0.mlp.up_proj.bias"
    edit_tensors(packed, **{name.replace(".", "__"): torch.zeros(256)})
    assert torch.equal(expected, logits(load_decoder(packed, torch.float32, "cpu", keep_codes=True)))
    edit_tensors(packed, **{name.replace(".", "__"): torch.ones(256)})
    assert_damaged(packed, rf"tensor {name} is unexpected")


def test_weights_of_codes_are_filled_without_a_second_copy(tmp_path):
    """What is owned beside the decoder is less than the largest part in float32, and the decoder is a quarter of bfloat16."""
    plain = plain_folder(tmp_path / "plain", vocab_size=8)
    folder = pack_folder(plain, gptq(4, 128, zeros=False), GPTQ | {"bits": 4, "group_size": 128})
    net, large = quantised_decoder(folder), quantised_decoder(plain)
    owned, beside = filling(net, folder)
    whole, _ = filling(large, plain)
    assert owned < 0.32 * whole
    assert beside < 4 * 256 * 128


# --- what is refused


@pytest.fixture
def packed(tmp_path) -> Path:
    plain = plain_folder(tmp_path / "plain")
    return pack_folder(plain, gptq(4, 64), GPTQ | {"bits": 4, "group_size": 64})


def assert_damaged(folder: Path, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_decoder(folder, torch.float32, "cpu", keep_codes=True)


def test_codes_are_not_quantised_again(packed):
    with pytest.raises(SettingError, match=r"quantize is int8, but .*packed is already quantised: leave quantize out"):
        load_decoder(packed, torch.float32, "cpu", quantize=INT8)


def test_codes_that_are_not_asked_for_become_plain_numbers_and_a_line_says_so(packed, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "attend.model"):
        net = load_decoder(packed, torch.float32, "cpu")
    assert not any(isinstance(module, QuantisedLinear) for module in net.modules())
    assert torch.equal(logits(net), logits(load_decoder(tmp_path / "plain", torch.float32, "cpu")))
    assert "quantised weights of the checkpoint are dequantised in memory" in caplog.text


NAME = "model.layers.1.mlp.down_proj"
GROUPS = torch.arange(256, dtype=torch.int32) // 64
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no zeros": ({"qzeros": ...}, f"tensor {NAME}.qzeros is missing"),
    "no scales": ({"scales": ...}, f"tensor {NAME}.scales is missing"),
    "no codes": ({"qweight": ...}, f"tensor {NAME}.qweight is missing"),
    "codes of 64 bits": (
        {"qweight": torch.zeros(32, 128, dtype=torch.int64)},
        f"model.safetensors: tensor {NAME}.qweight is I64, expected one of I32",
    ),
    "whole scales": ({"scales": torch.ones(4, 128, dtype=torch.int32)}, f"tensor {NAME}.scales is I32, expected one of F32"),
    "scales of other groups": (
        {"scales": torch.ones(8, 128)},
        rf"model.safetensors: tensor {NAME}.scales has shape \[8, 128\], expected \[4, 128\]",
    ),
    "scales the other way": ({"scales": torch.ones(128, 4)}, rf"tensor {NAME}.scales has shape \[128, 4\]"),
    "a scale that is NaN": ({"scales": torch.full((4, 128), torch.nan)}, f"tensor {NAME}.qweight holds NaN or infinity"),
    "a scale that is infinite": ({"scales": torch.full((4, 128), torch.inf)}, f"tensor {NAME}.qweight holds NaN or infinity"),
    "sorted columns": (
        {"g_idx": GROUPS.flip(0).contiguous()},
        rf"model.safetensors: tensor {NAME}.qweight: its columns were sorted .*\(act-order\), .*desc_act false",
    ),
    "two forms": ({"weight": torch.ones(128, 256)}, f"tensor {NAME}.weight is unexpected"),
}


@pytest.mark.parametrize(("changes", "named"), BAD.values(), ids=BAD)
def test_a_damaged_packed_folder_is_named(packed, changes, named):
    edit_tensors(packed, **{f"{NAME}.{part}".replace(".", "__"): tensor for part, tensor in changes.items()})
    assert_damaged(packed, named)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_a_tied_head_of_codes_or_of_other_numbers_is_named(tmp_path, dtype):
    folder = pack_folder(plain_folder(tmp_path / "plain", tie_word_embeddings=True), awq(64), AWQ | {"group_size": 64})
    edit_tensors(folder, lm_head__weight=torch.ones(96, 128, dtype=dtype))
    assert_damaged(folder, "tensor lm_head.weight is not model.embed_tokens.weight, but config.json has tie_word_embeddings")


def test_groups_that_do_not_divide_the_width_are_named(packed):
    edit_config(packed, quantization_config=GPTQ | {"bits": 4, "group_size": 96})
    assert_damaged(packed, r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: groups of 96 do not divide 128 columns")


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (GPTQ | {"bits": 3}, "weights of 3 bits are not supported; known: 4, 8"),
    "2 bits": (GPTQ | {"bits": 2}, "weights of 2 bits are not supported; known: 4, 8"),
    "no bits": (GPTQ, "bits must be an integer; got None"),
    "awq of 8 bits": (AWQ | {"bits": 8}, "weights of 8 bits are not supported; known: 4"),
    "groups of 16": (
        GPTQ | {"bits": 4, "group_size": 16},
        "groups of 16 columns are not supported; known: multiples of 32, and -1",
    ),
    "groups of 48": (AWQ | {"group_size": 48}, "groups of 48 columns are not supported"),
    "gemv": (AWQ | {"version": "GEMV"}, "AWQ in the layout 'gemv' is not supported; known: 'gemm'"),
    "llm-awq": (AWQ | {"backend": "llm-awq"}, "AWQ in the layout 'llm-awq' is not supported"),
    "marlin": (
        GPTQ | {"bits": 4, "checkpoint_format": "marlin"},
        "GPTQ in the layout 'marlin' is not supported; known: gptq, gptq_v2",
    ),
    "old marlin": (GPTQ | {"bits": 4, "is_marlin_format": True}, "GPTQ in the layout 'marlin' is not supported"),
    "dynamic": (
        GPTQ | {"bits": 4, "dynamic": {"-:.*v_proj": {}, "+:.*up": {"bits": 8}}},
        r"dynamic has settings of its own for '\+:.\*up'",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        r"'bitsandbytes' \(.*NF4.*\) is not supported; .*--quantize",
    ),
    **{
        name: (
            {"quant_method": name},
            rf"quant_method '{name}' \(.*\) is not supported; known: awq, .*Instead take the model's AWQ, GPTQ",
        )
        for name in ("torchao", "hqq", "nvfp4", "exl3")
    },
    "bitsandbytes of old": ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, r"'bitsandbytes' \(.*\) is not supported"),
    "mlx": ({"group_size": 64, "bits": 4}, r"'mlx' \(MLX: .*\) is not supported; .*GGUF"),
    "gptq without its name": ({"bits": 4, "group_size": 128, "desc_act": False}, "it must be an object with a quant_method"),
    "a stranger": ({"quant_method": "new"}, "quant_method 'new' is not supported; known: awq, compressed-tensors"),
    "no method": ({"bits": 4}, "it must be an object with a quant_method"),
    "nothing": ({}, "it must be an object with a quant_method"),
    "a value of another type": (GPTQ | {"bits": 4, "dynamic": 3}, "it has a value of the wrong type: "),
    "no object": (["gptq"], "it must be an object with a quant_method"),
}


@pytest.mark.parametrize(("settings", "named"), SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("inside", [False, True], ids=["", "in text_config"])
def test_what_is_not_read_is_refused_by_name(tmp_path, settings, named, inside):
    folder = plain_folder(tmp_path / "plain")
    key = "text_config" if inside else "quantization_config"
    edit_config(folder, **{key: {"quantization_config": settings} if inside else settings})
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: .*{named}"):
        read_config(folder)


@pytest.mark.parametrize("lacks", [set(), {"biases"}], ids=["", "without biases"])
def test_a_folder_of_mlx_is_refused_by_that_name(tmp_path, lacks):
    """True if its config says so, or its tensors alone."""
    folder = plain_folder(tmp_path)
    said = {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8}}
    edit_config(folder, quantization=said, quantization_config=said)
    with pytest.raises(CheckpointError, match=r"config\.json: quantization: quant_method 'mlx' \(MLX: .*\) is not supported"):
        read_config(folder)
    edit_config(folder, quantization=..., quantization_config=...)
    name = "model.layers.0.mlp.down_proj"
    codes = {"weight": torch.ones(128, 32, dtype=torch.uint32), "scales": torch.ones(128, 4), "biases": torch.ones(128, 4)}
    edit_tensors(folder, **{f"{name}.{part}": tensor for part, tensor in codes.items() if part not in lacks})
    told = "scales" if lacks else "biases"
    for check in (inspect, lambda path: load_decoder(path, torch.float32, "cpu")):
        with pytest.raises(CheckpointError, match=rf"tensor {name}\.{told} is not read: quant_method 'mlx' \(MLX: "):
            check(folder)
