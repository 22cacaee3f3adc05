"""The shapes as GGUF files of random blocks, whose scales are numbers: for loading, where nobody asks what a model says."""

from pathlib import Path

import numpy
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from attend.model.shapes import SHAPES
from loadtest.bench.shapes import FOLDER

KINDS = {
    "Q8_0": (Type.Q8_0, Type.Q8_0),
    "Q4_0": (Type.Q4_0, Type.Q4_0),
    "Q4_K_M": (Type.Q4_K, Type.Q6_K),
    "BF16": (Type.BF16, Type.BF16),
}
"""The type of most matrices, and of the embedding, and of values and `down` in every second layer."""
WORDS = 256
"""Tokens of the vocabulary that are written: all that a tokenizer needs."""


def write_gguf(shape: str, kind: str, folder: Path = FOLDER) -> Path:
    """The file of a shape, made at the first call."""
    path = folder / f"{shape}-{kind}.gguf"
    if path.is_file():
        return path
    folder.mkdir(exist_ok=True)
    sizes, (most, others), unfinished = SHAPES[shape], KINDS[kind], path.with_suffix(".part")
    hidden, mlp, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim", hidden // heads)
    kv = head * sizes["num_key_value_heads"]
    writer, dice = GGUFWriter(unfinished, "llama"), numpy.random.default_rng(0)
    _describe(writer, sizes, head)

    def put(name: str, rows: int, columns: int, each: Type) -> None:
        writer.add_tensor(f"{name}.weight", _rows(rows, columns, each, dice), raw_dtype=each)

    put("token_embd", sizes["vocab_size"], hidden, others)
    writer.add_tensor("output_norm.weight", numpy.ones(hidden, numpy.float32))
    for layer in range(sizes["num_hidden_layers"]):
        block, some = f"blk.{layer}.", others if layer % 2 else most
        for name, rows in (("attn_q", head * heads), ("attn_k", kv)):
            put(block + name, rows, hidden, most)
        put(f"{block}attn_v", kv, hidden, some)
        put(f"{block}attn_output", hidden, head * heads, most)
        for name in ("ffn_gate", "ffn_up"):
            put(block + name, mlp, hidden, most)
        put(f"{block}ffn_down", hidden, mlp, some)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}{name}.weight", numpy.ones(hidden, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _describe(writer: GGUFWriter, sizes: dict[str, int], head: int) -> None:
    writer.add_context_length(2048)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes["vocab_size"])
    words = [f"<0x{byte:02X}>" for byte in range(WORDS)]
    words += [f"word {number}" for number in range(WORDS, sizes["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([6] * WORDS + [5] * (len(words) - WORDS))


def _rows(rows: int, columns: int, kind: Type, dice: numpy.random.Generator) -> NDArray[numpy.uint8]:
    """Random blocks."""
    if kind == Type.BF16:
        return (dice.integers(0, 1 << 16, (rows, columns), dtype=numpy.uint16) & 0x3FFF).view(numpy.uint8)
    block, size = GGML_QUANT_SIZES[kind]
    found = dice.integers(0, 256, (rows * columns // block, size), dtype=numpy.uint8)
    scales = dice.uniform(0.0005, 0.002, (len(found), 2)).astype(numpy.float16).view(numpy.uint8)
    if kind == Type.Q6_K:
        found[:, -2:] = scales[:, :2]
    elif kind in (Type.Q8_0, Type.Q4_0):
        found[found == 0x80] = 1  # no quantiser writes it
        found[:, :2] = scales[:, :2]
    else:
        found[:, :4] = scales
    return found.reshape(rows, -1)
