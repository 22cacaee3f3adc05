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

from tests.model.checkpoints import DEEPSEEK, KINDS, LATENT, VOCAB, shaped, spread

Type = GGMLQuantizationType
Config = Mapping[str, Any]
Blocks = Callable[[str, Tensor], tuple[numpy.ndarray, Type]]
"""(name, tensor) -> what is written of it, and in what type."""

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe"}
ARCHITECTURES |= {
    "minimax_m2": "minimax-m2",
    "lfm2_moe": "lfm2moe",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "gemma4_text": "gemma4",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}
ARCHITECTURES |= {"cohere": "command-r", "hunyuan_v1_dense": "hunyuan-dense", "ministral3": "mistral3"}
ARCHITECTURES |= {"qwen2_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe"}
ARCHITECTURES |= {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
"""By `model_type`, where it is not the same word."""
NEIGHBOURS = ("llama", "mistral", "mixtral", "granite", "smollm3", "granitemoe", "granitemoeshared", "granitemoehybrid")
NEIGHBOURS += ("arcee", "ministral3", "olmo")

_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN |= {"mscale": 0.7, "mscale_all_dim": 0.7}
MADE: dict[str, Callable[[], nn.Module]] = {
    kind: KINDS[kind]
    for kind in (
        *("llama", "llama-tied", "llama-biased", "llama3-rope", "llama-linear", "llama-yarn", "mistral", "mixtral"),
        *("qwen2", "qwen2-tied", "qwen2_moe", "qwen3", "qwen3-tied", "qwen3_moe", "granite", "smollm3", "gemma"),
        *("phi3", "phi3-long", "phi3-partial", "olmo2", "olmo3", "gpt_oss", "glm4", "glm4_moe", "glm4_moe-plain"),
        *(
            "ernie4_5_moe",
            "minimax_m2",
            "olmoe",
            "granitemoe",
            "granitemoeshared",
            "granitemoehybrid",
            "granitemoehybrid-dense",
            "lfm2",
            "lfm2_moe",
        ),
        *("seed_oss", "ernie4_5", "hunyuan_v1_dense", "hunyuan_v1_dense-alpha", "exaone4", "exaone4-whole", "arcee", "cohere"),
        *("qwen2_vl", "qwen3_vl", "qwen3_vl_moe-everywhere"),
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
    "deepseek_v2": lambda: shaped("DeepseekV2", **LATENT | {"q_lora_rank": None}, **DEEPSEEK, rope_parameters=_YARN),
    "deepseek_v2-groups": lambda: shaped("DeepseekV2", **LATENT, **DEEPSEEK, topk_method="group_limited_greedy"),
    "deepseek_v3": lambda: shaped("DeepseekV3", **LATENT, **DEEPSEEK, rope_parameters=_YARN),
    "cohere2": lambda: shaped("Cohere2", sliding_window=7, logit_scale=3.0),
    "nemotron": lambda: shaped("Nemotron", head_dim=16),
    "olmo": lambda: shaped("Olmo"),
    "ministral3": lambda: shaped(
        "Ministral3",
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 9}
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    ),
    "gemma4_text": lambda: KINDS["gemma4_text"](),
    "gemma4_text-shared": lambda: KINDS["gemma4_text-shared"](),
    "gemma4_text-experts": lambda: KINDS["gemma4_text-experts"](),
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


def make(kind: str, folder: Path, maker: Callable[[], nn.Module] | None = None) -> Path:
    """A checkpoint folder of `kind`, or of what `maker` makes in its place, written by `transformers`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        net = (maker or MADE[kind])()
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
    config |= config.get("text_config", {}) | {"model_type": config["model_type"]}
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
    """llama.cpp's name of a `model_type`. Its converter calls a Granite 4 without Mamba and experts a Granite."""
    if config.get("num_local_experts") == 0:
        return "granite"
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def letters() -> dict[str, Any]:
    """A vocabulary of VOCAB tokens: a printable character each, and <|endoftext|>."""
    words = [*(chr(code) for code in range(33, 127)), "Ġ", "<|endoftext|>"]
    assert len(words) == VOCAB
    kinds = [1] * (VOCAB - 1) + [3]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": kinds, "merges": ["t h"]} | {"eos_token_id": 2}


def described(config: Config) -> dict[str, Any]:
    """The metadata of an architecture, by what follows its name."""
    heads, head, convolves = config["num_attention_heads"], config.get("head_dim"), "conv_L_cache" in config
    said: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": _first(config, "rms_norm_eps", *(["norm_eps"] if convolves else [])),
        "attention.layer_norm_epsilon": _first(config, "layer_norm_eps", "norm_epsilon", *([] if convolves else ["norm_eps"])),
        "attention.key_length": head,
        "attention.value_length": head,
        "vocab_size": config["vocab_size"],
    }
    rope = config.get("rope_parameters") or {}
    said |= _rope(config, rope.get("full_attention", rope), rope) | _own(config) | _delta(config)
    return said | (_gemma4(config) if config["model_type"] == "gemma4_text" else {})


def _gemma4(config: Config) -> dict[str, Any]:
    """Layers without a window have heads of their own, and those that share keys and values may have a wider MLP."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = {int(layer): heads for layer, heads in config["per_layer_config"].items()}
    whole = own[slides.index(False)]
    shared, width = config["num_kv_shared_layers"], config["intermediate_size"]
    said = {f"attention.{name}_length": whole["head_dim"] for name in ("key", "value")}
    said |= {f"attention.{name}_length_swa": config["head_dim"] for name in ("key", "value")}
    said |= {"rope.dimension_count": whole["head_dim"], "rope.dimension_count_swa": config["head_dim"]}
    said |= {"attention.shared_kv_layers": shared, "embedding_length_per_layer_input": config["hidden_size_per_layer_input"]}
    said |= {"attention.sliding_window_pattern": slides, "attention.sliding_window": config["sliding_window"]}
    usual = config["num_key_value_heads"]
    said["attention.head_count_kv"] = [own.get(layer, {}).get("num_key_value_heads", usual) for layer in range(len(slides))]
    said["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["use_double_wide_mlp"]:
        said["feed_forward_length"] = [width * (2 if layer >= len(slides) - shared else 1) for layer in range(len(slides))]
    return said | {"expert_used_count": config["top_k_experts"]}


def _rope(config: Config, rope: Config, ropes: Config) -> dict[str, Any]:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    said: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    said["rope.dimension_count"] = int(head * share)
    if rope.get("rope_type") in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        said["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        said["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim")
    if rope.get("alpha"):
        said["rope.freq_base"] *= rope["alpha"] ** (head / (head - 2))
        said |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
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
        "expert_count": _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": _first(config, "num_experts_per_tok", "moe_k"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": config.get("logits_scaling", config.get("logit_scale")),
        "attn_logit_softcapping": config.get("attn_logit_softcapping") if kind == "gemma2" else None,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    said["attention.temperature_scale"] = (config.get("rope_parameters") or {}).get("llama_4_scaling_beta")
    if kind.endswith(("_vl", "_vl_moe")):
        said |= {"rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 1 if "qwen3" in kind else None}
    if kind == "olmo":
        said["attention.layer_norm_epsilon"] = 1e-5
    if kind == "exaone4" and config.get("sliding_window"):
        said["attention.sliding_window"] = config["sliding_window"]
        said["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if kind in ("gemma2", "gemma3_text", "olmo3", "gpt_oss", "cohere2", "phi3"):
        said["attention.sliding_window"] = config.get("sliding_window") or 0
    if kind == "olmo3":
        said["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if kind in ("gpt_oss", "minimax_m2"):
        said["expert_feed_forward_length"] = config["intermediate_size"]
    if kind.startswith("lfm2"):
        counts = [config["num_key_value_heads"] if layer != "conv" else 0 for layer in config["layer_types"]]
        said |= {"attention.head_count_kv": counts, "shortconv.l_cache": config["conv_L_cache"]}
    if kind == "lfm2":
        width = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
        said["feed_forward_length"] = -(-width // config["block_multiple_of"]) * config["block_multiple_of"]
    return said | _routed(config) | _granite(config) | _latent(config)


def _routed(config: Config) -> dict[str, Any]:
    """What mixtures have whose routers have corrections. GLM's layers that guess are counted."""
    kind, said = config["model_type"], {}
    if kind == "glm4_moe":
        said = {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1, "expert_gating_func": 2}
        said |= {"expert_weights_norm": config["norm_topk_prob"], "expert_weights_scale": config["routed_scaling_factor"]}
        said |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
        said |= {
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
        }
    if kind == "ernie4_5_moe":
        said = {"expert_shared_count": config["moe_num_shared_experts"], "expert_shared_feed_forward_length": 24}
        said |= {"leading_dense_block_count": config["moe_layer_start_index"]}
        said |= {"interleave_moe_layer_step": config["moe_layer_interval"]}
    if kind in ("minimax_m2", "lfm2_moe"):
        said = {"expert_gating_func": 2, "leading_dense_block_count": config.get("num_dense_layers")}
    return said


def _latent(config: Config) -> dict[str, Any]:
    """What models with latent attention have: their head is what is cached. V2 says no kind of scores."""
    if "kv_lora_rank" not in config:
        return {}
    rope, turned, rank = config["rope_parameters"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    limited = config.get("topk_method") != "greedy"
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": turned,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if rope["rope_type"] == "yarn" else None,
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"] if limited else 1,
        "expert_group_used_count": config["topk_group"] if limited else 1,
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else None,
        "leading_dense_block_count": config["first_k_dense_replace"],
    }


def _granite(config: Config) -> dict[str, Any]:
    """What Granite's mixtures have; Granite 4 has keys of Mamba, and says whether it rotates."""
    said: dict[str, Any] = {}
    if config.get("shared_intermediate_size") and config.get("num_local_experts"):
        said["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    if config["model_type"] == "granitemoehybrid":
        said |= {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 1, "ssm.inner_size": 64, "ssm.time_step_rank": 8}
        said |= {"rope.scaling.finetuned": config.get("position_embedding_type") == "rope"}
        said |= {"attention.head_count_kv": [config["num_key_value_heads"]] * config["num_hidden_layers"]}
        if not config["num_local_experts"]:
            said |= {"feed_forward_length": config["shared_intermediate_size"], "expert_used_count": None, "expert_count": 0}
    return said


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


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
    for name, tensor in _undivided(_merged(_of_text(load_file(folder / "model.safetensors")), config), config):
        if name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            yield f"blk.{name.split('.')[2]}.{part}.scale", tensor.float()
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, _arranged(name, tensor.float(), config)
    if config["model_type"] == "glm4_moe":
        yield f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight", torch.zeros(4, 8)
    yield from _factors(config)


def _of_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The text model's tensors, under the names that it has by itself."""
    alone = {
        name.replace(".language_model.", ".").replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm"): name
        for name in tensors
    }
    return {ours: tensors[name] for ours, name in alone.items() if "visual." not in name}


def _arranged(name: str, tensor: Tensor, config: Config) -> Tensor:
    part = name.rpartition(".")[0]
    if config["model_type"] in NEIGHBOURS and part.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if config["model_type"] in ("gemma", "gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        return tensor + 1
    if config["model_type"].startswith(("qwen3_5", "qwen3_next")):
        return _arranged_delta(name, tensor, config)
    squeezed = ("shared_expert_gate", "e_score_correction", "conv.conv.weight")
    return tensor.squeeze() if any(part in name for part in squeezed) else tensor


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
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("expert_bias", "expert_bias.bias")
        start, mark, rest = name.partition(".experts.")
        halves = {".block_sparse_moe.input_linear.": "mlp.experts", ".shared_mlp.input_linear.": "mlp.shared_experts"}
        half = next((half for half in halves if half in name), None)
        if name.endswith((".sinks", ".layer_scalar")) or (config["model_type"] == "gemma4_text" and mark):
            yield f"{name}.weight", tensor
        elif half is not None:
            experts = halves[half] if config["num_local_experts"] else "mlp"
            for part, own in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=-2), strict=True):
                yield name.replace(half, f".{experts}.{part}."), own
        elif ".shared_mlp.output_linear." in name and not config["num_local_experts"]:
            yield name.replace(".shared_mlp.output_linear.", ".mlp.down_proj."), tensor
        elif ".kv_b_proj." in name:
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            key, value = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), key.mT
            yield name.replace("kv_b_proj", "v_b_proj"), value
        elif not mark or (config["model_type"] not in ("gpt_oss", "qwen3_vl_moe") and rest in ("gate_up_proj", "down_proj")):
            yield name, tensor
        elif config["model_type"] == "qwen3_vl_moe":
            halves = tensor.chunk(2, dim=1) if "gate_up" in rest else (tensor,)
            for part, own in zip(("gate_proj", "up_proj") if len(halves) > 1 else ("down_proj",), halves, strict=True):
                yield f"{start}.experts.{part}.weight", own
        elif config["model_type"] == "gpt_oss":
            ending = "bias" if rest.endswith("_bias") else "weight"
            parts = {"down_proj": tensor} if "down" in rest else {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]}
            for part, own in parts.items():
                yield f"{start}.experts.{part}.{ending}", own if ending == "bias" else own.mT
        elif rest.startswith("0."):
            part = rest.removeprefix("0.")
            experts = range(_first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
            stacked = torch.stack([tensors[f"{start}.experts.{expert}.{part}"] for expert in experts])
            mixtral = {"w1.weight": "gate_proj.weight", "w2.weight": "down_proj.weight", "w3.weight": "up_proj.weight"}
            start = start.replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
            yield f"{start}.experts.{mixtral.get(part, part)}", stacked


def _factors(config: Config) -> Iterator[tuple[str, Tensor]]:
    """Factors of wavelengths, which GGUF keeps as tensors."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        half = config["per_layer_config"]["1"]["head_dim"] // 2
        turning = half // 4
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (half - turning))
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
