"""What GGUF files of Qwen3-Next and Qwen3.5 alone have: value heads apart, joined inputs, layers that predict."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder, read_config
from attend.model.net.quantised import QuantisedLinear
from tests.model.checkpoints import shaped, spread
from tests.model.gguf_files import Type, make, plain, stored_as, write_gguf
from tests.model.net.formats.test_gguf import DELTA_KINDS, TOKENS, Change, dequantised, matrices, our_logits, random_blocks

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 32}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A Qwen3.5 whose rows are whole blocks of 256; four value heads share a key head."""
    return written(tmp_path_factory.mktemp("wide"), **DELTA)


def written(folder: Path, **more: object) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = shaped("Qwen3_5Text", **sizes, layer_types=["linear_attention", "full_attention"], **more)
        spread(net)
    net.save_pretrained(folder)
    return folder


def logits(path: Path) -> Tensor:
    return our_logits(load_decoder(path, torch.float32, "cpu", context=64), TOKENS * 2)


@pytest.mark.parametrize("kind", DELTA_KINDS)
def test_every_number_is_that_of_the_checkpoint(kind, tmp_path):
    folder = make(kind, tmp_path / "theirs")
    ours, theirs = (load_decoder(path, torch.float32, "cpu") for path in (write_gguf(folder, tmp_path / "tiny.gguf"), folder))
    for (name, mine), parameter in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, parameter, rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize(
    "kind", [Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.Q3_K, Type.IQ4_XS, Type.IQ2_S], ids=lambda kind: kind.name
)
def test_columns_of_value_heads_lie_side_by_side_whatever_their_type(kind, wide, tmp_path):
    """So the same numbers in F32 are the same model, and codes that are kept are these numbers."""
    blocks = write_gguf(wide, tmp_path / "blocks.gguf", random_blocks(kind))
    numbers = write_gguf(wide, tmp_path / "numbers.gguf", dequantised(random_blocks(kind)))
    ours, theirs = (load_decoder(path, torch.float32, "cpu") for path in (blocks, numbers))
    kept = load_decoder(blocks, torch.float32, "cpu", keep_codes=True)
    for name, matrix in matrices(theirs).items():
        assert (matrices(ours)[name] - matrix).abs().max() <= 1e-6 * matrix.abs().max(), name
    merge, whole = kept.blocks[0].attention.merge, theirs.blocks[0].attention.merge
    assert isinstance(merge, QuantisedLinear)
    assert (merge.dense() - whole.dense()).abs().max() <= whole.dense().abs().max() / 100


def test_heads_that_end_within_a_block_are_refused_by_the_tensor(tmp_path):
    folder = written(tmp_path / "theirs", **DELTA | {"linear_value_head_dim": 12})
    path = write_gguf(folder, tmp_path / "tiny.gguf", stored_as(Type.Q8_0))
    for read in (inspect, lambda path: load_decoder(path, torch.float32, "cpu")):
        with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ssm_out\.weight is Q8_0, and its heads end within a block"):
            read(path)


def test_a_speed_that_is_not_below_zero_is_named(tmp_path):
    def spoil(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
        tensors["blk.0.ssm_a"][0][1] = 0.5

    path = write_gguf(make("qwen3_5_text", tmp_path / "theirs"), tmp_path / "tiny.gguf", change=spoil)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ssm_a holds NaN or infinity"):
        load_decoder(path, torch.float32, "cpu")


def join_experts(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
    """As a converter does that is asked to."""
    for layer in range(4):
        parts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight")[0] for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = numpy.concatenate(parts, axis=1), Type.F32


def join_inputs(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
    """As the first files of qwen3next have them: head by head."""
    for layer in range(3):
        qkv, z = (tensors.pop(f"blk.{layer}.attn_{part}.weight")[0] for part in ("qkv", "gate"))
        heads = [part.reshape(2, -1, qkv.shape[1]) for part in (*numpy.split(qkv, [32, 64]), z)]
        tensors[f"blk.{layer}.ssm_in.weight"] = numpy.concatenate(heads, axis=1).reshape(-1, qkv.shape[1]), Type.F32


@pytest.mark.parametrize(
    ("kind", "change"),
    [("qwen3_next", join_inputs), ("qwen3_next", join_experts), ("qwen3_5_moe_text-square", join_experts)],
    ids=["inputs", "experts", "experts apart"],
)
def test_tensors_that_are_joined_are_the_same_model(kind, change: Change, tmp_path):
    folder = make(kind, tmp_path / "theirs")
    joined, parted = write_gguf(folder, tmp_path / "a.gguf", change=change), write_gguf(folder, tmp_path / "b.gguf")
    nets = [load_decoder(path, torch.float32, "cpu") for path in (joined, parted)]
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def predicting(layer: int) -> Change:
    """Tensors of a layer for multi-token prediction."""

    def add(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
        full = {name: held for name, held in tensors.items() if name.startswith("blk.3.")}
        tensors |= {name.replace("blk.3.", f"blk.{layer}."): held for name, held in full.items()}
        tensors[f"blk.{layer}.nextn.eh_proj.weight"] = numpy.ones((32, 64), numpy.float32), Type.F32

    return add


@pytest.mark.parametrize("kind", ["qwen3_5_text-square", "qwen3_5_moe_text-square"])
def test_layers_for_multi_token_prediction_are_left_out_by_name(kind, tmp_path, caplog):
    caplog.set_level("INFO", "attend.model")
    folder, arch = make(kind, tmp_path / "theirs"), "qwen35moe" if "moe" in kind else "qwen35"
    said = {f"{arch}.block_count": 5, f"{arch}.nextn_predict_layers": 1}
    path = write_gguf(folder, tmp_path / "a.gguf", metadata=said, change=predicting(4))
    assert torch.equal(logits(path), logits(write_gguf(folder, tmp_path / "b.gguf")))
    assert "the tensors blk.4.* are left out: multi-token prediction (MTP) is not supported" in caplog.text
    inspect(path)


def test_a_layer_too_many_is_no_layer_that_predicts(tmp_path):
    path = write_gguf(make("qwen3_5_text-square", tmp_path / "theirs"), tmp_path / "a.gguf", change=predicting(4))
    with pytest.raises(CheckpointError, match=r"tensor blk\.4\.\S+ is unexpected"):
        inspect(path)


REFUSED = {
    "nextn_predict_layers": (4, "qwen35.nextn_predict_layers must be below block_count 4; got 4"),
    "ssm.inner_size": (62, "qwen35.ssm.inner_size 62 is not divisible by ssm.time_step_rank 4"),
    "rope.dimension_sections": ([8, 8, 8, 8], "qwen35.rope.dimension_sections has a fourth section, which is not supported"),
    "attention.recurrent_layers": (True, "qwen35.attention.recurrent_layers must be an array; got True"),
    "attention.scale": (0.5, "qwen35.attention.scale is an unknown key, which may change what the model computes"),
    "ssm.group_count": (
        3,
        "its metadata as a config.json: config.json: delta: 4 value heads are not divisible by 3 key heads",
    ),
}


@pytest.mark.parametrize("key", list(REFUSED))
def test_what_is_not_carried_out_is_refused_by_its_key(key, tmp_path):
    value, sentence = REFUSED[key]
    folder = make("qwen3_5_text-square", tmp_path / "theirs")
    path = write_gguf(folder, tmp_path / "tiny.gguf", plain, metadata={f"qwen35.{key}": value})
    with pytest.raises(CheckpointError) as error:
        read_config(path)
    assert sentence in str(error.value)
