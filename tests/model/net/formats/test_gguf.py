"""A GGUF file is the checkpoint that it was written from: every logit, for every family and type that is read."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder, makes_text, read_config
from attend.model.net.formats.codes import GROUP
from attend.model.net.formats.ggml import FORMS, NATIVE
from attend.model.net.formats.gguf import READ
from attend.model.net.linear import Linear
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.paged_attention import ReferenceBackend
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import DEEPSEEK, LATENT, VOCAB, edit_config, shaped, spread, their_logits, their_model
from tests.model.gguf_files import MADE, Blocks, Type, letters, make, plain, stored_as, write_gguf
from tests.model.net.native.test_native import distance, needs_library, run, run_native

TOKENS = [5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12, 8, 8, 91, 20, 1]
DELTA_KINDS = [kind for kind in MADE if kind.startswith(("qwen3_5", "qwen3_next"))]
QUANTISED = [kind for kind in READ if kind not in (Type.F32, Type.F16, Type.BF16)]


@torch.no_grad()
def our_logits(net: Decoder, tokens: list[int] = TOKENS) -> Tensor:
    """The logits [T, V] of one text."""
    return net.logits(hidden_states(net, torch.tensor([tokens])))


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", list(MADE))
def test_a_file_has_the_logits_of_its_checkpoint(kind, times, tmp_path):
    """Also where the text is longer than what a stretched rope has learned. The delta rule norms what may be near 0."""
    folder, tokens = make(kind, tmp_path / "theirs"), TOKENS * times
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    theirs = their_logits(their_model(folder), tokens)
    ours = our_logits(load_decoder(path, torch.float32, "cpu", context=len(tokens)), tokens)
    assert (ours - theirs).abs().max() <= (2e-4 if kind in DELTA_KINDS else 1e-5) * theirs.abs().max()


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A Llama whose rows are whole blocks of 256."""
    folder = tmp_path_factory.mktemp("wide")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = shaped("Llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64)
        spread(net)
    net.save_pretrained(folder)
    return folder


AT_END = {Type.Q2_K: 4, Type.Q3_K: 2, Type.Q6_K: 2, Type.TQ1_0: 2, Type.TQ2_0: 2}
"""Bytes of the scales at the end of a block; other types have them first."""


def random_blocks(kind: Type, seed: int = 0) -> Blocks:
    """Matrices of random bytes, with scales that are numbers: every bit of a block says something."""
    generator = numpy.random.default_rng(seed)

    def blocks(name: str, tensor: Tensor) -> tuple[numpy.ndarray, Type]:
        columns, size = GGML_QUANT_SIZES[kind]
        if tensor.dim() < 2 or tensor.shape[-1] % columns:
            return plain(name, tensor)
        count = tensor.numel() // columns
        numbers = generator.integers(0, 256, (count, size), dtype=numpy.uint8)
        widest = 0.0001 if kind == Type.IQ4_XS else 0.002  # its table and its scales go far
        halves = generator.uniform(-widest, widest, (count, 2)).astype(numpy.float16).view(numpy.uint8)
        if kind == Type.Q8_0:
            numbers[numbers == 0x80] = 0x81  # -128, which no quantiser writes
        if kind == Type.MXFP4:
            numbers[:, 0] = generator.integers(117, 122, count)
        elif kind == Type.IQ1_M:  # whose scale lies in the highest bits of four words
            words, bits = numbers[:, -8:].view(numpy.uint16), halves[:, :2].copy().view(numpy.uint16)
            numbers[:, -8:] = (words & 0xFFF | (bits >> numpy.array([0, 4, 8, 12]) & 15) << 12).astype("<u2").view(numpy.uint8)
        elif kind in AT_END:
            numbers[:, -AT_END[kind] :] = halves[:, : AT_END[kind]]
        else:
            two = kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
            numbers[:, : 4 if two else 2] = halves[:, : 4 if two else 2]
        return numbers.reshape(*tensor.shape[:-1], -1), kind

    return blocks


def dequantised(blocks: Blocks) -> Blocks:
    """The same numbers in F32, as the package makes them."""

    def made(name: str, tensor: Tensor) -> tuple[numpy.ndarray, Type]:
        numbers, kind = blocks(name, tensor)
        return (numbers, kind) if kind == Type.F32 else (dequantize(numbers, kind), Type.F32)

    return made


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_blocks_are_the_numbers_that_the_package_makes_of_them(kind, wide, tmp_path):
    blocks = write_gguf(wide, tmp_path / "blocks.gguf", random_blocks(kind))
    numbers = write_gguf(wide, tmp_path / "numbers.gguf", dequantised(random_blocks(kind)))
    ours, theirs = (load_decoder(path, torch.float32, "cpu") for path in (blocks, numbers))
    for (name, mine), plain_one in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine - plain_one).abs().max() <= 1e-6 * plain_one.abs().max(), name


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_parts_of_latent_attention_are_the_numbers_of_their_blocks(kind, tmp_path):
    """Of each head one part lies turned round; rotated rows change places; what is absorbed is kept plain."""
    shape = LATENT | {"qk_nope_head_dim": 256, "v_head_dim": 64, "kv_lora_rank": 256, "q_lora_rank": 256}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = shaped("DeepseekV3", **shape, **DEEPSEEK, hidden_size=256, num_hidden_layers=2)
        spread(net)
    net.save_pretrained(tmp_path / "theirs")

    def blocks(name: str, tensor: Tensor) -> tuple[numpy.ndarray, Type]:
        whole = stored_as(kind) if kind in (Type.F16, Type.BF16) else random_blocks(kind)
        return (whole if ".attn_" in name and tensor.dim() > 1 else plain)(name, tensor)

    paths = (tmp_path / name for name in ("blocks.gguf", "numbers.gguf"))
    stored, numbers = (
        write_gguf(tmp_path / "theirs", path, each) for path, each in zip(paths, (blocks, dequantised(blocks)), strict=True)
    )
    ours, theirs = (load_decoder(path, torch.float32, "cpu") for path in (stored, numbers))
    for (name, mine), plain_one in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine - plain_one).abs().max() <= 1e-6 * plain_one.abs().max(), name
    kept = load_decoder(stored, torch.float32, "cpu", keep_codes=True)
    assert type(kept.blocks[1].attention.kv_up) is Linear
    for name in ("query.q_down", "query.q_up", "kv_down", "out"):
        mine, plain_one = (net.blocks[1].attention.get_submodule(name).dense() for net in (kept, theirs))
        assert (mine - plain_one).abs().max() <= 5e-3 * plain_one.abs().max(), name


def test_matrices_of_a_type_that_is_served_stay_in_the_mapped_file(wide, tmp_path):
    path = write_gguf(wide, tmp_path / "tiny.gguf", stored_as(Type.BF16))
    net = load_decoder(path, torch.bfloat16, "cpu", keep_mapped=True)
    copied = load_decoder(path, torch.bfloat16, "cpu")
    block = net.blocks[0]  # whose queries and keys lie in another order there
    left = [len(linear.mapped_rows) for linear in (block.attention.qkv, block.mlp.gate_up, block.mlp.down, copied.head)]
    assert left == [0, 2, 1, 0]
    assert matrices(net).keys() == matrices(copied).keys()
    assert all(torch.equal(matrix, matrices(copied)[name]) for name, matrix in matrices(net).items())


def matrices(net: Decoder) -> dict[str, Tensor]:
    """Every matrix, by our names."""
    return {name: module.dense() for name, module in net.named_modules() if isinstance(module, Linear)}


KINDS_OF_256 = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q6_K, Type.IQ4_XS)
MIXED = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "attn_k": Type.Q4_1, "ffn_up": Type.Q5_0, "token_embd": Type.Q8_0}


@needs_library
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("mixed", [False, True], ids=["of one type", "mixed"])
def test_the_native_decoder_unpacks_a_file_to_the_bits_that_torch_makes_of_it(kind, mixed, wide, tmp_path):
    """Rows of queries and keys change places. Types that are joined have 8 bits together."""

    def blocks(name: str, tensor: Tensor) -> tuple[numpy.ndarray, Type]:
        part = next((each for key, each in MIXED.items() if key in name and mixed), kind)
        return random_blocks(part, seed=len(name))(name, tensor)

    path = write_gguf(wide, tmp_path / "tiny.gguf", blocks)
    found = []
    for mapped in (True, False):
        net = load_decoder(path, torch.bfloat16, "cpu", keep_codes=True, keep_mapped=mapped)
        assert bool(net.blocks[0].attention.qkv.mapped_rows) == (mapped and kind in NATIVE)
        NativeDecoder(net, spend=True)
        found.append(matrices(net))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(matrix, found[1][name]) for name, matrix in found[0].items())


@needs_library
@pytest.mark.parametrize("name", ["blk.0.attn_k.weight", "blk.0.ffn_down.weight", "output.weight"])
@pytest.mark.parametrize("kind", [Type.Q8_0, *KINDS_OF_256, Type.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf])
def test_a_number_that_is_none_is_named_when_the_native_decoder_unpacks_it(name, kind, bad, wide, tmp_path):
    def broken(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
        numbers = tensors[name][0] if kind == Type.BF16 else tensors[name][0].reshape(-1, GGML_QUANT_SIZES[kind][1])
        if kind == Type.BF16:
            numbers.view(numpy.uint16)[5, 7] = 0x7F80 if bad == numpy.inf else 0x7FC0
        else:
            at = numbers.shape[1] - AT_END[kind] if kind in AT_END else 0
            numbers[3, at : at + 2] = numpy.array([bad], numpy.float16).view(numpy.uint8)

    path = write_gguf(
        wide, tmp_path / "tiny.gguf", stored_as(kind) if kind == Type.BF16 else random_blocks(kind), change=broken
    )
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: tiny\.gguf: tensor {name} holds NaN or infinity"):
        NativeDecoder(load_decoder(path, torch.bfloat16, "cpu", keep_codes=True, keep_mapped=True), spend=True)


def test_queries_keys_and_values_in_one_tensor_are_the_same_model(tmp_path):
    folder = make("qwen3", tmp_path / "theirs")

    def join(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
        for layer in range(2):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight")[0] for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.weight"] = numpy.concatenate(parts), Type.F32

    joined = load_decoder(write_gguf(folder, tmp_path / "a.gguf", change=join), torch.float32, "cpu")
    parted = load_decoder(write_gguf(folder, tmp_path / "b.gguf"), torch.float32, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(joined.parameters(), parted.parameters(), strict=True))


Change = Callable[[dict[str, tuple[numpy.ndarray, Type]]], object]
DOWN, NORM = "blk.1.ffn_down.weight", "output_norm.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "missing": (lambda tensors: tensors.pop(DOWN), f"tensor {DOWN} is missing"),
    "unexpected": (lambda tensors: tensors.update(odd=tensors[NORM]), "tiny.gguf: tensor odd is unexpected"),
    "misshapen": (
        lambda tensors: tensors.update({DOWN: (tensors[DOWN][0][:-1], Type.F32)}),
        f"tiny.gguf: tensor {DOWN} has shape [31, 48], expected [32, 48]",
    ),
    "a vector in blocks": (
        lambda tensors: tensors.update({NORM: (quantize(numpy.ones(32, numpy.float32), Type.Q8_0), Type.Q8_0)}),
        f"tiny.gguf: tensor {NORM} is Q8_0, expected one of F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_tensor_that_does_not_fit_is_named_with_its_file(what, tmp_path):
    change, sentence = WRONG[what]
    path = write_gguf(make("llama", tmp_path / "theirs"), tmp_path / "tiny.gguf", change=change)
    for read in (inspect, lambda path: load_decoder(path, torch.float32, "cpu")):
        with pytest.raises(CheckpointError) as error:
            read(path)
        assert sentence in str(error.value)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0, Type.Q4_1, *KINDS_OF_256, Type.TQ2_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf])
def test_numbers_and_scales_that_are_not_finite_are_named(kind, bad, wide, tmp_path):
    def spoil(tensors: dict[str, tuple[numpy.ndarray, Type]]) -> None:
        numbers, stored = tensors["blk.0.ffn_up.weight"]
        row = numbers[3].view(numpy.float32 if stored == Type.F32 else numpy.float16)
        row[-1 if stored in AT_END else 0] = bad

    path = write_gguf(wide, tmp_path / "tiny.gguf", plain if kind == Type.F32 else random_blocks(kind), change=spoil)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: tensor blk\.0\.ffn_up\.weight holds NaN or infinity"):
        load_decoder(path, torch.float32, "cpu")


def test_a_family_has_the_vocabulary_of_its_embedding(tmp_path):
    assert inspect(write_gguf(make("llama", tmp_path / "theirs"), tmp_path / "tiny.gguf")).vocab_size == VOCAB


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_codes_that_are_kept_are_the_numbers_but_for_scales_in_float16(kind, wide, tmp_path, caplog):
    caplog.set_level("INFO", "attend.model")
    path = write_gguf(wide, tmp_path / "tiny.gguf", random_blocks(kind))
    plain_net, kept = load_decoder(path, torch.float32, "cpu"), load_decoder(path, torch.float32, "cpu", keep_codes=True)
    form = FORMS[kind]
    for one, other in [(plain_net.blocks[0].mlp.down, kept.blocks[0].mlp.down), (plain_net.head, kept.head)]:
        assert isinstance(other, QuantisedLinear) and (other.kind, other.has_minima) == (form.kind, form.has_minima)
        groups, kept_groups = (each.unflatten(-1, (-1, GROUP)) for each in (one.weight, other.dense()))
        largest = groups.abs().amax(-1, keepdim=True)
        assert ((groups - kept_groups).abs() <= (1 / 127 if form.rounded_types else 2**-9) * largest + 1e-9).all()
    said = "are requantised to int8, 8.5 bits per weight: no form of codes is exact for their types, " + kind.name
    assert (said in caplog.text) is bool(form.rounded_types)
    near = (our_logits(kept) - our_logits(plain_net)).norm() / our_logits(plain_net).norm()
    assert near < (0.05 if form.rounded_types else 0.01)


def test_a_tied_head_has_the_codes_of_the_embedding(tmp_path):
    path = write_gguf(make("llama-tied", tmp_path / "theirs"), tmp_path / "tiny.gguf", stored_as(Type.Q8_0))
    net = load_decoder(path, torch.float32, "cpu", keep_codes=True)
    assert isinstance(net.head, QuantisedLinear) and net.head.codes is net.embedding.tokens.codes
    assert (our_logits(net) - our_logits(load_decoder(path, torch.float32, "cpu"))).norm() < 0.05 * our_logits(net).norm()


def test_experts_keep_their_codes(tmp_path):
    path = write_gguf(make("qwen3_moe", tmp_path / "theirs"), tmp_path / "tiny.gguf", stored_as(Type.Q8_0))
    kept, plain_net = load_decoder(path, torch.float32, "cpu", keep_codes=True), load_decoder(path, torch.float32, "cpu")
    experts, router = kept.blocks[0].mlp.experts.gate_up, kept.blocks[0].mlp.router
    assert isinstance(experts, QuantisedLinear) and not isinstance(router, QuantisedLinear)
    assert (experts.dense() - plain_net.blocks[0].mlp.experts.gate_up.weight).norm() < 0.01 * experts.dense().norm()


@needs_library
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@torch.inference_mode()
def test_the_native_decoder_multiplies_the_codes_that_are_kept(kind, wide, tmp_path):
    path = write_gguf(wide, tmp_path / "tiny.gguf", random_blocks(kind))
    texts = [torch.tensor(TOKENS * 2), torch.tensor(TOKENS[:3])]
    found = run_native(load_decoder(path, torch.bfloat16, "cpu", keep_codes=True, keep_mapped=True), 1000, 32, texts=texts)
    whole = load_decoder(path, torch.float32, "cpu")
    wanted = run(whole, ReferenceBackend(whole.config.attention_variants), 1000, 32, torch.float32, texts)
    assert distance(found, wanted) <= (0.25 if FORMS[kind].rounded_types else 0.05)


WHOLE = 0.1 * math.log(4.0) + 1
"""What follows from the factor of `llama-yarn`."""


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ({"yarn_attn_factor": WHOLE}, {}),
        ({"yarn_attn_factor": 1.3}, {"attention_factor": 1.3}),
        ({"yarn_attn_factor": 1.0, "attn_factor": 0.5}, {"attn_factor": 0.5}),
        ({"yarn_attn_factor": WHOLE, "attn_factor": WHOLE}, {}),
        ({"attn_factor": WHOLE}, {}),
        ({"yarn_log_multiplier": 0.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}),
        ({"yarn_ext_factor": 1.0}, {}),
        ({"yarn_ext_factor": -1.0}, {}),
    ],
    ids=str,
)
def test_the_keys_of_yarn_mean_what_llama_cpp_takes_them_for(tmp_path, said, same):
    """`yarn_attn_factor` is a whole `attention_factor`; a `yarn_log_multiplier` is an `mscale_all_dim`."""
    folder = make("llama-yarn", tmp_path / "theirs")
    metadata = {f"llama.rope.scaling.{key}": value for key, value in said.items()}
    path = write_gguf(folder, tmp_path / "tiny.gguf", metadata=metadata)
    plain = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_config(folder, rope_parameters=plain | same)
    assert read_config(path).rope_scaling == read_config(folder).rope_scaling


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3"])
def test_a_reranker_scores_by_the_two_rows_of_its_head_and_makes_no_text(kind, tmp_path):
    """As converted Qwen3-Rerankers are: no head of a text, also where the embedding is not it."""
    tokens, rows = letters(), numpy.random.default_rng(0).normal(size=(2, 32)).astype(numpy.float32)
    tokens["tokens"][7], tokens["tokens"][30] = "yes", "no"
    said = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["no", "yes"], "tokenizer.chat_template.rerank": "x"}

    def change(tensors: dict[str, Any]) -> None:
        tensors.pop("output.weight", None)
        tensors["cls.output.weight"] = (rows, Type.F32)

    path = write_gguf(make(kind, tmp_path / "theirs"), tmp_path / "m.gguf", metadata=said, tokens=tokens, change=change)
    wanted = numpy.zeros((VOCAB, 32), numpy.float32)
    wanted[30], wanted[7] = rows
    for keep_codes in (False, True):
        assert torch.equal(load_decoder(path, torch.float32, "cpu", keep_codes=keep_codes).head.weight, torch.tensor(wanted))
    assert not makes_text(path)
    other = write_gguf(tmp_path / "theirs", tmp_path / "o.gguf", metadata=said | {"qwen3.classifier.output_labels": ["a", "b"]})
    with pytest.raises(CheckpointError, match=r"qwen3\.classifier\.output_labels must be yes and no, with pooling_type 4"):
        read_config(other)
