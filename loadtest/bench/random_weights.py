"""Random weights of a shape as a checkpoint folder or as a GGUF file, written tensor by tensor from pools that are repeated."""

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from numpy.typing import NDArray

from attend.model.config import DEFAULT_MODEL, ModelConfig
from attend.model.gguf.common import CONVOLVING, FREQUENCIES
from attend.model.net.families.family import Family
from attend.model.net.families.table import family_of, part_shapes, read_checked, their_names
from attend.model.net.formats.gguf import LFM2, WEIGHTS
from attend.model.net.rope import frequencies_of
from attend.model.net.transformer import Decoder
from attend.model.rope import Llama3Scaling

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
"""GGUF's names of families, where they are not the same word."""
MOST = {"q8_0": Type.Q8_0, "q4_0": Type.Q4_0, "q4_k_m": Type.Q4_K}
"""What most matrices of a GGUF file are in, by the file's format."""
ODD_ROWS = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
"""What takes the place of a type whose blocks do not divide a row."""
BLOCKS = 65537
"""In a pool; a prime number, so that the rows of a matrix begin at different places of it."""
Bytes = NDArray[numpy.uint8]


class RandomTensor(NamedTuple):
    """A tensor of a checkpoint."""

    ours: str
    name: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """True if it may be quantised."""
        return len(self.shape) > 1 and not self.ours.endswith(".convolution")

    @property
    def deviation(self) -> float:
        """Of its numbers: a power of two, so that there are few pools. With smaller ones greedy answers come to one token for
        ever; an embedding's are smaller, or with a tied head each token would be followed by itself.
        """
        power = int(numpy.log2(self.shape[-1]) / 2) + 2 * self.ours.startswith("embedding.")
        return float(2.0**-power)

    def form(self, most: Type, layers: int, *, has_tied_head: bool) -> Type:
        """Its type in a GGUF file, as llama.cpp's quantiser chooses."""
        if not self.is_matrix or ".router." in self.ours:
            return Type.F32
        if most != Type.Q8_0 and self.ours.startswith("embedding." if has_tied_head else "head."):
            most = Type.Q6_K
        elif most == Type.Q4_K and ("attn_v" in self.name or "ffn_down" in self.name):
            layer, eighth = int(self.name.split(".")[1]), layers // 8
            most = Type.Q6_K if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2 else most
        return most if self.shape[-1] % GGML_QUANT_SIZES[most][0] == 0 else ODD_ROWS.get(most, Type.F16)


def tensors(config: ModelConfig, family: Family) -> Iterator[RandomTensor]:
    """All tensors of a checkpoint whose names are those of `family`."""
    with torch.device("meta"):
        net = Decoder(config, context=0)
    for ours, parameter in net.named_parameters():
        theirs = their_names(family, config, ours)
        for name, shape in zip(theirs, part_shapes(config, ours, parameter.shape, len(theirs)), strict=True):
            yield RandomTensor(ours, name, shape)


@cache
def pool(kind: Type, deviation: float) -> Bytes:
    """Blocks [BLOCKS, bytes] of a type; of a type without blocks, 32 numbers count as one."""
    dice = numpy.random.default_rng(0)
    if kind not in (Type.Q4_K, Type.Q6_K):
        numbers = dice.standard_normal((BLOCKS, 32), numpy.float32) * numpy.float32(deviation)
        return numpy.ascontiguousarray(quantize(numbers, kind)).view(numpy.uint8)
    blocks = dice.integers(0, 256, (BLOCKS, GGML_QUANT_SIZES[kind][1]), numpy.uint8)
    if kind == Type.Q6_K:  # scale * 8 * (0 to 63 - 32)
        blocks[:, 192:208] = 8
        blocks[:, 208:] = numpy.array([deviation / 8 / 18.5], numpy.float16).view(numpy.uint8)
    else:  # scale * 16 * (0 to 15) - minimum * 16; the six bits of each 16 lie in two bytes
        step = deviation / 16 / 4.6
        blocks[:, :4] = numpy.array([step, 7.5 * step], numpy.float16).view(numpy.uint8)
        blocks[:, 4:16] = [16 | 1 << 6] * 8 + [0] * 4
    return blocks


def bytes_of(tensor: RandomTensor, at: int, kind: Type, gain: float = 1.0) -> Bytes:
    """The bytes of a tensor, the `at`-th one; gains are all the same."""
    if len(tensor.shape) == 1:
        return quantize(numpy.full(tensor.shape, gain if tensor.ours.endswith("weight") else 0.0, numpy.float32), kind).view(
            numpy.uint8
        )
    return numpy.resize(numpy.roll(pool(kind, tensor.deviation), 7919 * at % BLOCKS, axis=0), size_of(tensor.shape, kind))


def size_of(shape: tuple[int, ...], kind: Type) -> int:
    """Bytes of a tensor."""
    block, num_bytes = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * num_bytes


def write_folder(raw: dict[str, Any], folder: Path) -> None:
    """model.safetensors in bfloat16, and the tokenizer."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(raw["vocab_size"])), encoding="utf-8")
    about = json.loads((DEFAULT_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    about |= {"model_max_length": raw["max_position_embeddings"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    family, header, end = family_of(raw), {}, 0
    drawn = list(tensors(read_checked(family, raw), family))
    for each in drawn:
        begin, end = end, end + size_of(each.shape, Type.BF16)
        header[each.name] = {"dtype": "BF16", "shape": each.shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for at, each in enumerate(drawn):
            offset = (family.gain_offset or 0.0) if family.offset_gains.search(each.ours) else 0.0
            bytes_of(each, at, Type.BF16, 1.0 - offset).tofile(file)


def write_gguf(name: str, raw: dict[str, Any], path: Path, form: str) -> None:
    """A GGUF file in a format of MOST."""
    config, arch = read_checked(family_of(raw), raw), ARCHITECTURES.get(raw["model_type"], raw["model_type"])
    writer = GGUFWriter(path, arch)
    said = {f"{arch}.{key}": value for key, value in metadata(raw, config).items()} | vocabulary(config.vocab_size)
    adders: dict[type, Callable[[str, Any], None]] = {list: writer.add_array, int: writer.add_uint32}
    adders |= {float: writer.add_float32, str: writer.add_string}
    said |= {"general.name": name, "general.file_type": int(LlamaFileType[f"MOSTLY_{form.upper()}"])}
    for key, value in said.items():
        adders[type(value)](key, value)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(FREQUENCIES, factors.shape, factors.dtype, factors.nbytes)
    drawn = [
        (each, each.form(MOST[form], config.num_layers, has_tied_head=config.tied_head))
        for each in gguf_tensors(raw, config, arch)
    ]
    for each, kind in drawn:
        shape = [each.shape[0], *(size for size in each.shape[1:] if size > 1)]
        writer.add_tensor_info(each.name, shape, numpy.dtype("f4"), size_of(each.shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for at, (each, kind) in enumerate(drawn):
        writer.write_tensor_data(bytes_of(each, at, kind))
    writer.close()


def gguf_tensors(raw: dict[str, Any], config: ModelConfig, arch: str) -> Iterator[RandomTensor]:
    """The tensors under GGUF's names, where one has the matrices of all experts."""
    names = WEIGHTS | (LFM2 if arch in CONVOLVING else {})
    for each in tensors(config, replace(family_of(raw), weights=names, prefix="")):
        start, is_first, end = each.name.partition("[0]")
        if is_first:
            yield each._replace(name=start + end, shape=(config.num_experts or 1, *each.shape))
        elif "[" not in each.name:
            yield each


def rope_factors(config: ModelConfig) -> NDArray[numpy.float32] | None:
    """By how much Llama 3.1's wavelengths are stretched, which GGUF keeps as a tensor."""
    rope = config.layer(0).rope
    if rope is None or not isinstance(rope.scaling, Llama3Scaling):
        return None
    plain, stretched = (frequencies_of(each, 0)[0] for each in (replace(rope, scaling=None), rope))
    return (plain / stretched).numpy()


def metadata(raw: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """What a GGUF file says of the architecture, by what follows its name."""
    layer = next(each for each in config.layers if each.recurrence is None)
    counts = [0 if each.recurrence else each.num_kv_heads for each in config.layers]
    said: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.mlp_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": counts if 0 in counts else counts[0],
        "attention.key_length": layer.head_size,
        "attention.value_length": layer.head_size,
        "attention.layer_norm_rms_epsilon": float(raw.get("rms_norm_eps") or raw["norm_eps"]),
        "rope.dimension_count": layer.head_size,
        "rope.freq_base": float(raw["rope_theta"]),
    }
    if config.num_experts:
        size = {"expert_feed_forward_length": raw["moe_intermediate_size"]}
        said |= size | {"expert_count": config.num_experts, "expert_used_count": config.experts_per_token}
    if 0 in counts:
        said["shortconv.l_cache"] = raw["conv_L_cache"]
    if "sliding_window" in raw:
        said["attention.sliding_window"] = raw["sliding_window"]
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        said |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    return said


def tokenizer(size: int) -> dict[str, Any]:
    """The default model's tokenizer.json, with more words behind its own, which no text is split into."""
    found: dict[str, Any] = json.loads((DEFAULT_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = found["model"]["vocab"]
    vocab |= {f"\u0120word{token}": token for token in range(len(vocab), size)}
    return found


def vocabulary(size: int) -> dict[str, Any]:
    """The metadata of the same in a GGUF file."""
    model = tokenizer(size)["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [3] + [1] * (size - 1)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": kinds, "merges": merges, "eos_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}
