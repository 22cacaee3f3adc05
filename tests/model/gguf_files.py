"""GGUF files of tiny checkpoints, written with the package `gguf` as llama.cpp's converters write them.

Names of tensors come from the package's own table. What converters do to tensors is written here a second time, from llama.cpp.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor, nn

from tests.model.checkpoints import KINDS, VOCAB, shaped, spread

Type = GGMLQuantizationType
Config = Mapping[str, Any]
Blocks = Callable[[str, Tensor], tuple[numpy.ndarray, Type]]
"""(name, tensor) -> what is written of it, and in what type."""

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next"}
ARCHITECTURES |= {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
"""By `model_type`, where it is not the same word."""
NEIGHBOURS = ("llama", "mistral", "mixtral", "granite", "smollm3")

MADE: dict[str, Callable[[], nn.Module]] = {
    kind: KINDS[kind]
    for kind in (
        *("llama", "llama-tied", "llama-biased", "llama3-rope", "llama-linear", "llama-yarn", "mistral", "mixtral"),
        *("qwen2", "qwen2-tied", "qwen2_moe", "qwen3", "qwen3-tied", "qwen3_moe", "granite", "smollm3", "gemma"),
        *("phi3", "phi3-long", "phi3-partial", "olmo2", "olmo3", "gpt_oss", "glm4"),
        *("qwen3_5_text", "qwen3_5_text-odd", "qwen3_5_moe_text"),
    )
}
_SQUARE: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_SQUARE |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_EXPERTS |= {"shared_expert_intermediate_size": 12}
MADE |= {
    "gemma2": lambda: shaped("Gemma2", sliding_window=7, query_pre_attn_scalar=8),
    "gemma3_text": lambda: shaped("Gemma3Text", sliding_window=7, query_pre_attn_scalar=8, num_hidden_layers=7),
    "starcoder2": lambda: shaped("Starcoder2", sliding_window=None),
    "starcoder2-unbiased": lambda: shaped("Starcoder2", use_bias=False, sliding_window=None, tie_word_embeddings=False),
    "gpt_oss-unstretched": lambda: shaped(
        "GptOss",
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=7,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "cohere2": lambda: shaped("Cohere2", sliding_window=7, logit_scale=3.0),
    "qwen3_5_text-square": lambda: shaped("Qwen3_5Text", **_SQUARE),
    "qwen3_5_text-whole": lambda: shaped(
        "Qwen3_5Text",
        **_SQUARE | {"linear_num_key_heads": 4},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ),
    "qwen3_5_moe_text-square": lambda: shaped("Qwen3_5MoeText", **_SQUARE, **_EXPERTS),
    "qwen3_next": lambda: shaped("Qwen3Next", **_SQUARE, **_EXPERTS),
}
"""Tiny checkpoints that GGUF has words for."""


def make(kind: str, folder: Path) -> Path:
    """A checkpoint folder of `kind`, written by `transformers`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        net = MADE[kind]()
        spread(net)
    net.save_pretrained(folder)
    return folder


def plain(name: str, tensor: Tensor) -> tuple[numpy.ndarray, Type]:
    """Every tensor in F32."""
    return tensor.float().numpy(), Type.F32


def stored_as(kind: Type) -> Blocks:
    """Matrices whose rows are whole blocks in a type, as the package quantises it; the others in F32."""

    def blocks(name: str, tensor: Tensor) -> tuple[numpy.ndarray, Type]:
        if tensor.dim() < 2 or tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            return plain(name, tensor)
        return quantize(tensor.float().numpy(), kind), kind

    return blocks


def write_gguf(
    folder: Path,
    path: Path,
    blocks: Blocks = plain,
    *,
    tokens: Config | None = None,
    metadata: Config | None = None,
    drop: tuple[str, ...] = (),
    change: Callable[[dict[str, tuple[numpy.ndarray, Type]]], None] = lambda tensors: None,
) -> Path:
    """The GGUF file of a checkpoint folder, with a vocabulary and further metadata, where None stands for no key.

    `drop` names metadata that are left out, `change` may change the tensors before they are written.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch = architecture(config)
    writer = GGUFWriter(path, arch)
    said = {f"{arch}.{key}": value for key, value in described(config).items()}
    said |= {f"tokenizer.ggml.{key}": value for key, value in (tokens or letters()).items()} | dict(metadata or {})
    for key, value in said.items():
        if value is not None and key not in drop:
            add(writer, key, value)
    tensors = {name: blocks(name, tensor) for name, tensor in converted(folder, config)}
    change(tensors)
    for name, (numbers, kind) in tensors.items():
        writer.add_tensor(name, numpy.ascontiguousarray(numbers), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write a value in the type that converters write it in."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def architecture(config: Config) -> str:
    """llama.cpp's name of a `model_type`."""
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def letters() -> dict[str, Any]:
    """A vocabulary of VOCAB tokens: a printable character each, and <|endoftext|>."""
    words = [*(chr(code) for code in range(33, 127)), "Ġ", "<|endoftext|>"]
    assert len(words) == VOCAB
    kinds = [1] * (VOCAB - 1) + [3]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": kinds, "merges": ["t h"]} | {"eos_token_id": 2}


def described(config: Config) -> dict[str, Any]:
    """The metadata of an architecture, by what follows its name."""
    heads, head = config["num_attention_heads"], config.get("head_dim")
    said: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", config.get("norm_epsilon")),
        "attention.key_length": head,
        "attention.value_length": head,
        "vocab_size": config["vocab_size"],
    }
    rope = config.get("rope_parameters") or {}
    return said | _rope(config, rope.get("full_attention", rope), rope) | _own(config) | _delta(config)


def _rope(config: Config, rope: Config, ropes: Config) -> dict[str, Any]:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    said: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    said["rope.dimension_count"] = int(head * share)
    if rope.get("rope_type") in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        said["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if config["model_type"] == "gemma3_text":
        said["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if config["model_type"] == "phi3":
        said["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if rope.get("rope_type") == "longrope":
        scale = config["max_position_embeddings"] / said["rope.scaling.original_context_length"]
        original = numpy.log(said["rope.scaling.original_context_length"])
        said |= {"rope.scaling.attn_factor": float(numpy.sqrt(1 + numpy.log(scale) / original))}
    return said


def _own(config: Config) -> dict[str, Any]:
    """What single architectures have."""
    kind = config["model_type"]
    said = {
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": config.get("logits_scaling", config.get("logit_scale")),
        "attn_logit_softcapping": config.get("attn_logit_softcapping") if kind == "gemma2" else None,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if kind in ("gemma2", "gemma3_text", "olmo3", "gpt_oss", "cohere2", "phi3"):
        said["attention.sliding_window"] = config.get("sliding_window") or 0
    if kind == "olmo3":
        said["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if kind == "gpt_oss":
        said["expert_feed_forward_length"] = config["intermediate_size"]
    return said


def _delta(config: Config) -> dict[str, Any]:
    """What architectures with the delta rule have; a converter writes an interval alone, llama.cpp reads the layers too."""
    if "linear_num_value_heads" not in config:
        return {}
    said = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": 4,
    }
    if config["model_type"] != "qwen3_next":
        turned = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2  # pairs of columns
        said["rope.dimension_sections"] = [*((turned + 2 - part) // 3 for part in range(3)), 0]
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    if recurrent != [(layer + 1) % 4 != 0 for layer in range(len(recurrent))]:
        said["attention.recurrent_layers"] = recurrent
    return said


def converted(folder: Path, config: Config) -> Iterator[tuple[str, Tensor]]:
    """The tensors under llama.cpp's names, in its order of rows."""
    arch = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture(config))
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _undivided(_merged(load_file(folder / "model.safetensors"), config), config):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, _arranged(name, tensor.float(), config)
    yield from _factors(config)


def _arranged(name: str, tensor: Tensor, config: Config) -> Tensor:
    part = name.rpartition(".")[0]
    if config["model_type"] in NEIGHBOURS and part.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if config["model_type"].startswith(("qwen3_5", "qwen3_next")):
        return _arranged_delta(name, tensor, config)
    return tensor.squeeze() if "shared_expert_gate" in name else tensor


def _arranged_delta(name: str, tensor: Tensor, config: Config) -> Tensor:
    """What converters do to Qwen3-Next and Qwen3.5: value heads lie apart in the latter."""
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    tensor = tensor.squeeze() if "conv1d" in name or "shared_expert_gate" in name else tensor
    if "linear_attn." not in name or config["model_type"] == "qwen3_next":
        return tensor
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = numpy.arange(heads).reshape(key_heads, -1).T.flatten()  # which head stands in each place

    def apart(rows: Tensor) -> Tensor:
        return rows.reshape(heads, -1, *rows.shape[1:])[order].reshape(rows.shape)

    if "out_proj" in name:
        return apart(tensor.T).T
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * key_heads * config["linear_key_head_dim"]
        return torch.cat((tensor[:first], apart(tensor[first:])))
    return tensor if "linear_attn.norm" in name else apart(tensor)


def _undivided(tensors: Iterator[tuple[str, Tensor]], config: Config) -> Iterator[tuple[str, Tensor]]:
    """With the converters' names, what a checkpoint has in one tensor: experts' gates, and the inputs of the delta rule."""
    for name, tensor in tensors:
        name = name.replace("language_model.", "").replace(".dt_bias", ".dt_proj.bias")
        if name.endswith("experts.gate_up_proj"):
            for part, rows in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), rows
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        elif name.endswith("in_proj_qkvz.weight"):
            heads, keys, values = (config[f"linear_{each}"] for each in ("num_key_heads", "key_head_dim", "value_head_dim"))
            values *= config["linear_num_value_heads"] // heads
            parts = tensor.reshape(heads, -1, tensor.shape[1]).split((keys, keys, values, values), dim=1)
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            yield name.replace("qkvz", "qkv"), torch.cat((q, k, v))
            yield name.replace("qkvz", "z"), z
        else:
            yield name, tensor


def _merged(tensors: Mapping[str, Tensor], config: Config) -> Iterator[tuple[str, Tensor]]:
    """Experts as one tensor of each projection; sinks with an ending."""
    for name, tensor in sorted(tensors.items()):
        start, mark, rest = name.partition(".experts.")
        if name.endswith(".sinks"):
            yield f"{name}.weight", tensor
        elif not mark or (config["model_type"] != "gpt_oss" and rest in ("gate_up_proj", "down_proj")):
            yield name, tensor
        elif config["model_type"] == "gpt_oss":
            ending = "bias" if rest.endswith("_bias") else "weight"
            parts = {"down_proj": tensor} if "down" in rest else {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]}
            for part, own in parts.items():
                yield f"{start}.experts.{part}.{ending}", own if ending == "bias" else own.mT
        elif rest.startswith("0."):
            part = rest.removeprefix("0.")
            experts = range(config.get("num_local_experts") or config["num_experts"])
            stacked = torch.stack([tensors[f"{start}.experts.{expert}.{part}"] for expert in experts])
            mixtral = {"w1.weight": "gate_proj.weight", "w2.weight": "down_proj.weight", "w3.weight": "up_proj.weight"}
            yield f"{start.replace('block_sparse_moe', 'mlp')}.experts.{mixtral.get(part, part)}", stacked


def _factors(config: Config) -> Iterator[tuple[str, Tensor]]:
    """Factors of wavelengths, which GGUF keeps as tensors."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.tensor(_llama3(rope, config["head_dim"]), dtype=torch.float32)


def _llama3(rope: Config, head: int) -> list[float]:
    """By how much each wavelength is stretched."""
    factors, original = [], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for pair in range(0, head, 2):
        length = 2 * numpy.pi * rope["rope_theta"] ** (pair / head)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def byte_level(raw: RawTokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """The vocabulary of a byte-level tokenizer."""
    model = json.loads(raw.to_str())["model"]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return {"model": "gpt2", "pre": pre, **_words(raw), "merges": merges} | more


def scored(raw: RawTokenizer, **more: Any) -> dict[str, Any]:
    """The vocabulary of a tokenizer with byte fallback; a token's score is the place of its first merge."""
    model = json.loads(raw.to_str())["model"]
    places: dict[str, int] = {}
    for place, pair in enumerate(model["merges"]):
        places.setdefault("".join(pair), place)
    said = _words(raw)
    scores = [-float(places.get(word, len(places) + 9)) for word in said["tokens"]]
    return {"model": "llama", **said, "scores": scores} | more


def _words(raw: RawTokenizer) -> dict[str, Any]:
    vocabulary = raw.get_vocab(with_added_tokens=True)
    added = raw.get_added_tokens_decoder()
    words = {token: word for word, token in vocabulary.items()}
    tokens = [words.get(token, f"[PAD{token}]") for token in range(max(words) + 1)]
    kinds = []
    for token, word in enumerate(tokens):
        if token not in words:
            kinds.append(5)
        elif token in added:
            kinds.append(2 if word == "<unk>" else 3 if added[token].special else 4)
        else:
            kinds.append(6 if word.startswith("<0x") and len(word) == 6 else 2 if word == "<unk>" else 1)
    return {"tokens": tokens, "token_type": kinds}
