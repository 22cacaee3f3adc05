"""Checkpoint folders: what is saved is what is loaded, and damage is named, never survived and never run."""

import json
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, lacks_head, load_decoder, read_config, save
from attend.model.net.linear import Linear
from attend.model.net.transformer import Decoder
from attend.model.rope import Llama3Scaling, ProportionalScaling
from attend.model.sublayers import DeltaSpec
from attend.model.train.loss import hidden_states
from attend.model.weights import INDEX
from tests.model.checkpoints import (
    KINDS,
    edit_config,
    edit_tensors,
    their_logits,
    their_model,
    tiny_config,
    tiny_decoder,
    write_checkpoint,
)
from tests.model.test_pooling import written

TOKENS = [5, 17, 80, 3, 44, 61, 9, 2]
LLAMA3 = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=32)

WRITTEN: dict[str, dict[str, Any]] = {
    "attend": {},
    "attend-llama3-rope": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "attend-original": {"norm": "layernorm", "positions": "sinusoidal", "activation": "relu", "gated_mlp": False}
    | {
        "norm_place": "post",
        "embedding_scale": 32**0.5,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "num_kv_heads": 4,
    },
    "attend-variants": {"sliding_window": 3, "window_layers": (1,), "softcap": 2.0, "attention_scale": 0.2},
    "attend-experts": {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "expert_layers": (1,), "mlp_bias": True}
    | {"routing": "chosen", "shared_expert_size": 20},
    "attend-sinks": {"sinks": True, "swiglu_limit": 1.5, "swiglu_slope": 1.2},
    "attend-delta": {"delta": DeltaSpec(1, 2, 8, 6, 3), "delta_layers": (1,), "attention_gate": True, "qkv_bias": True},
    "attend-hybrid": {"delta": DeltaSpec(1, 2, 8, 6, 3, negative_eigenvalues=True, norm_eps=1e-4), "delta_layers": (0,)}
    | {"norm_place": "output", "delta_norm_place": "pre", "rope_layers": ()},
    "attend-head-gate": {"head_gate": True, "rope_scaling": ProportionalScaling(2.0, 0.5)},
    "attend-conv": {"conv_kernel": 3, "conv_bias": True, "conv_layers": (1,)},
    "llama": {"tied_head": False, "rope_theta": 500.0},
    "llama-tied": {"bos_token_id": 1, "eos_token_ids": (2,)},
    "llama-biased": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "llama-llama3-rope": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "mistral-sliding": {"sliding_window": 3},
    "qwen2-sliding": {"qkv_bias": True, "sliding_window": 3, "window_layers": (0,)},
    "qwen3": {"qk_norm": "head", "norm_eps": 1e-3},
    "qwen3-untied": {"qk_norm": "head", "tied_head": False},
}
THEIRS = [name for name in WRITTEN if not name.startswith("attend")]


def decoder(name: str) -> Decoder:
    return tiny_decoder(tiny_config(family=name.split("-")[0], **WRITTEN[name]))


def logits(net: Decoder) -> torch.Tensor:
    return net.logits(hidden_states(net, torch.tensor([TOKENS])))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_saved_is_what_is_loaded(tmp_path, name):
    """Config, weights and logits, to the bit; and again after a second save of what was loaded."""
    net = decoder(name)
    save(net, tmp_path / "first", torch.float32)
    once = load_decoder(tmp_path / "first", torch.float32, "cpu")
    save(once, tmp_path / "second", torch.float32)
    twice = load_decoder(tmp_path / "second", torch.float32, "cpu")
    for loaded in (once, twice):
        assert net.config == loaded.config
        assert net.state_dict().keys() == loaded.state_dict().keys()
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in net.state_dict().items())
        assert torch.equal(logits(net), logits(loaded))


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_reads_what_we_save(tmp_path, name):
    net = decoder(name)
    save(net, tmp_path, torch.float32)
    torch.testing.assert_close(logits(net), their_logits(their_model(tmp_path), TOKENS), atol=1e-4, rtol=0)


def test_weights_are_saved_and_loaded_in_the_dtype_asked_for(tmp_path):
    net = decoder("qwen3")
    save(net, tmp_path, torch.bfloat16)
    assert {torch.bfloat16} == {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()}
    loaded = load_decoder(tmp_path, torch.float32, "cpu")
    for ours, theirs in zip(net.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), theirs)


def test_a_read_only_family_is_not_written(tmp_path):
    net = load_decoder(write_checkpoint("gpt2", tmp_path), torch.float32, "cpu")
    with pytest.raises(AssertionError, match="gpt2 checkpoints are read only"):
        save(net, tmp_path / "other", torch.float32)


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two, with an index; returns the index's map."""
    tensors = load_file(folder / "model.safetensors")
    table = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(table.values()):
        save_file({name: tensors[name] for name in tensors if table[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}), encoding="utf-8")
    return table


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
def test_shards_load_as_the_whole(tmp_path, kind):
    folder = write_checkpoint(kind, tmp_path)
    whole = load_decoder(folder, torch.float32, "cpu")
    shard(folder)
    assert torch.equal(logits(whole), logits(load_decoder(folder, torch.float32, "cpu")))


HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")
ALIKE = ("gemma3", "mistral3")
"""Kinds whose tensors have the same names with and without a head."""


def without_head(folder: Path, base: Path) -> Path:
    """What `transformers` writes of a checkpoint's model without its head; a head of its own is put beside it."""
    their_model(folder).base_model.save_pretrained(base)
    head = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name in HEADS}
    save_file(load_file(base / "model.safetensors") | head, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_saved_without_its_head_has_other_names_and_is_the_same(tmp_path, kind):
    """Checkpoints of embedding models are such: their config.json names the base class, their tensors lack its prefix."""
    folder = write_checkpoint(kind, tmp_path / "whole")
    base = without_head(folder, tmp_path / "base")
    names = {name for name in load_file(base / "model.safetensors") if name not in HEADS and not name.startswith("visual.")}
    assert bool(names & load_file(folder / "model.safetensors").keys()) == (kind.partition("-")[0] in ALIKE)
    inspect(base)
    assert torch.equal(logits(load_decoder(folder, torch.float32, "cpu")), logits(load_decoder(base, torch.float32, "cpu")))


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gpt_neox"])
def test_a_model_without_any_head_is_loaded_where_its_files_say_how_it_embeds(tmp_path, kind):
    """Qwen3-Embedding-8B and e5-mistral are such: no head is tied, and none is there."""
    folder, base = write_checkpoint(kind, tmp_path / "whole"), tmp_path / "base"
    their_model(folder).base_model.save_pretrained(base)
    head = "embed_out" if kind == "gpt_neox" else "lm_head"
    assert_damaged(base, f"tensor {head}.weight is missing")
    written(base)
    assert lacks_head(base) and inspect(base).tied_head
    hidden = [hidden_states(load_decoder(each, torch.float32, "cpu"), torch.tensor([TOKENS])) for each in (folder, base)]
    assert torch.equal(*hidden)
    written(folder)
    assert not lacks_head(folder)


def test_a_tied_head_that_was_saved_anyway_is_no_stranger(tmp_path):
    net = decoder("llama-tied")
    save(net, tmp_path, torch.float32)
    edit_tensors(tmp_path, lm_head__weight=net.head.weight.detach().clone())
    assert torch.equal(logits(net), logits(load_decoder(tmp_path, torch.float32, "cpu")))


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2"])
def test_a_head_that_the_config_ties_but_that_is_another_is_named(tmp_path, kind):
    """Transformers takes the head then; whoever would tie it anyway would answer something else, in silence."""
    folder = write_checkpoint(kind, tmp_path)
    [embedding] = [
        name for name in load_file(folder / "model.safetensors") if name.endswith(("embed_tokens.weight", "wte.weight"))
    ]
    edit_tensors(folder, lm_head__weight=load_file(folder / "model.safetensors")[embedding] + 1)
    assert_damaged(
        folder, f"model.safetensors: tensor lm_head.weight is not {embedding}, but config.json has tie_word_embeddings"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_one_number_that_is_none_is_found_wherever_it_stands(folder, dtype, value):
    name = "model.layers.1.mlp.down_proj.weight"
    for place in (0, 777, -1):
        tensor = torch.zeros(32, 48, dtype=dtype)
        tensor.view(-1)[place] = float(value)
        edit_tensors(folder, **{name.replace(".", "__"): tensor})
        assert_damaged(folder, f"model.safetensors: tensor {name} holds NaN or infinity")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight is unexpected"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2."),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers may be at most 4096; got 1000000000"),
        ({"hidden_size": 64}, "has shape [96, 32], expected [96, 64]"),
        ({"vocab_size": 97}, "has shape [96, 32], expected [97, 32]"),
        ({"num_key_value_heads": 4}, "k_proj.weight has shape [16, 32], expected [32, 32]"),
        ({"intermediate_size": 49}, "has shape [48, 32], expected [49, 32]"),
        ({"tie_word_embeddings": True}, "tensor lm_head.weight is not model.embed_tokens.weight"),
        ({"attention_bias": True, "mlp_bias": True}, "proj.bias is missing"),
        ({"model_type": "qwen3"}, "q_norm.weight is missing"),
    ],
    ids=str,
)
def test_a_config_that_is_not_the_weights_is_named_by_a_tensor(folder, changes, named):
    edit_config(folder, **changes)
    assert_damaged(folder, named)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
def test_mapped_matrices_are_the_same_numbers(tmp_path, kind):
    folder = write_checkpoint(kind, tmp_path)
    mapped, owned = load_decoder(folder, torch.float32, "cpu", keep_mapped=True), load_decoder(folder, torch.float32, "cpu")
    assert mapped.mapped_files is not None and owned.mapped_files is None
    pairs = zip(mapped.modules(), owned.modules(), strict=True)
    assert all(torch.equal(one.dense(), other.dense()) for one, other in pairs if isinstance(one, Linear))
    assert torch.equal(mapped.embedding.tokens.weight, owned.embedding.tokens.weight)


@pytest.mark.parametrize("other", ["q_proj", "k_proj", "v_proj"])
def test_a_matrix_whose_parts_are_stored_in_two_types_is_copied_whole(tmp_path, other):
    """What was left in the mapped file is taken from there when a later part cannot be."""
    folder = write_checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor.float() if other in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    mapped, owned = (load_decoder(folder, torch.bfloat16, "cpu", keep_mapped=each) for each in (True, False))
    qkv, down = mapped.blocks[0].attention.qkv, mapped.blocks[0].mlp.down
    assert (len(qkv.mapped_rows), len(down.mapped_rows)) == (0, 1)
    assert torch.equal(qkv.dense(), owned.blocks[0].attention.qkv.dense())


@pytest.mark.parametrize(
    ("stored", "served", "told"),
    [
        (torch.float16, torch.bfloat16, "weights in float16 are rounded to bfloat16; dtype = float32 is exact, and slower"),
        (torch.float32, torch.bfloat16, "weights in float32 are rounded to bfloat16; dtype = float32 is exact, and slower"),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float16, torch.float32, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("mapped", [False, True])
def test_bits_that_go_are_told(tmp_path, caplog, stored, served, told, mapped):
    save(tiny_decoder(tiny_config(head_size=32)), tmp_path, stored)
    with caplog.at_level("INFO", "attend.model"):
        load_decoder(tmp_path, served, "cpu", keep_mapped=mapped)
    assert caplog.messages == ([] if told is None else [told])


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "qwen2"])
def test_drawn_weights_need_no_file_and_are_the_same_each_time(tmp_path, kind):
    """Only config.json is there. Scores are finite, and differ."""
    folder = write_checkpoint(kind, tmp_path)
    (folder / "model.safetensors").unlink()
    first, again = (load_decoder(folder, torch.float32, "cpu", dummy=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    scores = logits(first)
    assert scores.isfinite().all()
    assert len(set(scores.argmax(-1).tolist())) > 1
    assert len(scores[0].unique()) > 0.9 * len(scores[0])
    assert (first.head.weight is first.embedding.tokens.weight) == first.config.tied_head


def test_the_bytes_that_are_read_are_reported_up_to_all_of_them(folder):
    told: list[tuple[int, int]] = []
    load_decoder(folder, torch.float32, "cpu", report=lambda *bytes_: told.append(bytes_))
    tensors = load_file(folder / "model.safetensors").values()
    size = (folder / "model.safetensors").stat().st_size
    assert told == sorted(told)
    assert told[-1] == (sum(tensor.nbytes for tensor in tensors), size)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("llama", tmp_path / "checkpoint")


def assert_damaged(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder, torch.float32, "cpu")
    for name in named:
        assert name in str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    assert_damaged(tmp_path / "absent", str(tmp_path / "absent"), "is not a folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert_damaged(folder, str(folder / name), "is missing")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 100_000], ids=lambda x: repr(x[:8]))
def test_damaged_json_is_named(folder, name, content):
    if name == INDEX:
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert_damaged(folder, name)


@pytest.mark.parametrize("table", [None, [], "model.safetensors", {"a": ["b"]}, {"a": 1}, {}], ids=repr)
def test_an_index_without_a_sound_map_is_named(folder, table):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}), encoding="utf-8")
    assert_damaged(folder, str(folder))


def test_a_missing_shard_is_named(folder):
    gone = sorted(set(shard(folder).values()))[1]
    (folder / gone).unlink()
    assert_damaged(folder, gone, "is missing")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "config.json"])
def test_an_index_cannot_point_out_of_its_folder(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    table = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table), encoding="utf-8")
    assert_damaged(folder, INDEX, f"names {name!r}, which is no safetensors file in the folder itself")


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_nothing_is_ever_unpickled(folder, name):
    """A pickle can run code: it is refused by name, under any name, and its code does not run."""
    mark = folder / "mark"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    assert_damaged(folder, name, "damaged" if name == "model.safetensors" else "is a pickle, which Attend never opens")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 200, 0.5, -1], ids=str)
def test_a_truncated_weight_file_is_named(folder, kept):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    assert_damaged(folder, str(path), "damaged")


@pytest.mark.parametrize("header", [b"not JSON at all!", b"[]", b'{"a": 1}', b"\xff\xff"], ids=repr)
def test_a_damaged_header_is_named(folder, header):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert_damaged(folder, str(path), "damaged")


NORM, WIDTH = "model.norm.weight", 32
BAD_TENSORS: dict[str, tuple[Any, str]] = {
    "missing": (..., "is missing"),
    "short": (torch.ones(WIDTH - 1), f"has shape [{WIDTH - 1}], expected [{WIDTH}]"),
    "of more dimensions": (torch.ones(1, WIDTH), f"has shape [1, {WIDTH}], expected [{WIDTH}]"),
    "scalar": (torch.tensor(1.0), f"has shape [], expected [{WIDTH}]"),
    "integer": (torch.ones(WIDTH, dtype=torch.int64), "is I64, expected"),
    "boolean": (torch.ones(WIDTH, dtype=torch.bool), "is BOOL, expected"),
    "eight-bit float": (torch.ones(WIDTH).to(torch.float8_e4m3fn), "is F8_E4M3"),
    "NaN": (torch.tensor([1.0] * (WIDTH - 1) + [float("nan")]), "holds NaN or infinity"),
    "infinite": (torch.full((WIDTH,), float("-inf")), "holds NaN or infinity"),
}


@pytest.mark.parametrize(("tensor", "problem"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_bad_tensor_is_named(folder, tensor, problem):
    edit_tensors(folder, **{NORM.replace(".", "__"): tensor})
    assert_damaged(folder, str(folder), f"tensor {NORM} ", problem, *([] if tensor is ... else ["model.safetensors"]))


def test_a_stranger_among_the_tensors_is_named(folder):
    edit_tensors(folder, model__layers__7__mlp__up_proj__weight=torch.ones(2))
    assert_damaged(folder, "model.safetensors", "tensor model.layers.7.mlp.up_proj.weight is unexpected")


def test_a_bad_part_of_a_fused_matrix_is_named(folder):
    edit_tensors(folder, model__layers__1__self_attn__k_proj__weight=torch.ones(3, WIDTH))
    assert_damaged(folder, "tensor model.layers.1.self_attn.k_proj.weight has shape [3, 32], expected [16, 32]")


def test_only_the_first_of_many_bad_tensors_are_listed(folder):
    (folder / "model.safetensors").unlink()
    save_file({"stranger": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"; and \d+ more$") as caught:
        load_decoder(folder, torch.float32, "cpu")
    assert str(caught.value).count("is missing") == 5


def test_reading_the_config_does_not_touch_the_weights(folder):
    (folder / "model.safetensors").unlink()
    assert isinstance(read_config(folder), ModelConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_folder_passes_inspection(tmp_path, kind):
    folder = write_checkpoint(kind, tmp_path)
    assert inspect(folder) == load_decoder(folder, torch.float32, "cpu").config


@pytest.mark.parametrize("problem", ["missing", "short", "scalar"])
def test_inspection_finds_what_loading_finds(folder, problem):
    """Names and shapes are checked without reading a value, in the words of `load`."""
    edit_tensors(folder, model__norm__weight=BAD_TENSORS[problem][0], stranger=torch.ones(1))
    messages = []
    for check in (inspect, lambda path: load_decoder(path, torch.float32, "cpu")):
        with pytest.raises(CheckpointError) as caught:
            check(folder)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert BAD_TENSORS[problem][1] in messages[0]
    assert "tensor stranger is unexpected" in messages[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_matrix_that_lies_the_wrong_way_is_named_with_both_shapes(tmp_path, kind):
    """Every one that is not square, whether its family stores [out, in] or [in, out]; by loading and by inspection."""
    folder = write_checkpoint(kind, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    oblong = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2 and len(set(tensor.shape)) == 2}
    assert len(oblong) > 4
    for name, tensor in oblong.items():
        save_file(tensors | {name: tensor.t().contiguous()}, folder / "model.safetensors", metadata={"format": "pt"})
        said = re.escape(f"tensor {name} has shape {list(tensor.t().shape)}, expected {list(tensor.shape)}")
        for check in (inspect, lambda path: load_decoder(path, torch.float32, "cpu")):
            with pytest.raises(CheckpointError, match=said):
                check(folder)
