"""Shapes of models with random weights, for measurements: a name stands for a config.json."""

import json
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from attend.model.errors import SettingError

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}


def _shape(kind: str, sizes: tuple[int, ...], positions: int, *, tied: bool = True, **more: Any) -> dict[str, Any]:
    """`sizes`: those of NAMES."""
    own = {"model_type": kind, "architectures": [CLASSES[kind]], "max_position_embeddings": positions, "hidden_act": "silu"}
    return own | dict(zip(NAMES, sizes, strict=True)) | {"tie_word_embeddings": tied, "attention_bias": False} | more


def _llama3(sizes: tuple[int, ...], head: int, factor: float, *, tied: bool) -> dict[str, Any]:
    """As published: Llama 3.1 and 3.2."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = {"rope_theta": 5e5, "rope_scaling": scaling | {"original_max_position_embeddings": 8192}, "mlp_bias": False}
    return _shape("llama", sizes, 1 << 17, tied=tied, head_dim=head, rms_norm_eps=1e-5, **more)


_QWEN3: dict[str, Any] = {"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_30B = _shape("qwen3_moe", (151936, 2048, 6144, 48, 32, 4), 40960, tied=False, **_QWEN3, **_EXPERTS, decoder_sparse_step=1)
SHAPES: dict[str, dict[str, Any]] = {
    "S": _shape("llama", (8192, 320, 864, 8, 5, 5), 1 << 15, head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4),
    "M": _shape("llama", (49152, 576, 1536, 30, 9, 3), 1 << 15, head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4),
    "L": _shape("llama", (151936, 896, 4864, 24, 14, 2), 1 << 15, head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4),
    "Q": _shape("llama", (151936, 1024, 3072, 28, 16, 8), 1 << 15, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e4),
    "llama-1b": _llama3((128256, 2048, 8192, 16, 32, 8), 64, 32.0, tied=True),
    "llama-8b": _llama3((128256, 4096, 14336, 32, 32, 8), 128, 8.0, tied=False),
    "qwen3-4b": _shape("qwen3", (151936, 2560, 9728, 36, 32, 8), 40960, **_QWEN3),
    "qwen3-30b-a3b": _30B,
    "qwen3-30b-a3b-12": _30B | {"num_hidden_layers": 12},
    "gemma3-4b": _shape("gemma3_text", (262208, 2560, 10240, 34, 8, 4), 1 << 17, head_dim=256, rms_norm_eps=1e-6)
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    | {"sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
    | {"hidden_activation": "gelu_pytorch_tanh"},
    "lfm2-1.2b": _shape("lfm2", (65536, 2048, 12288, 16, 32, 8), 128000, norm_eps=1e-5, rope_theta=1e6)
    | {"block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    | {"conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
}
"""S: 12.5M parameters; M: 134.5M, the sizes of SmolLM2-135M; L: 494M, those of Qwen2-0.5B; Q: 596M, those of Qwen3-0.6B; these
are Llama's family, tied. The others are Llama-3.2-1B, Llama-3.1-8B, Qwen3-4B, Qwen3-30B-A3B, whole and its first 12 layers,
Gemma 3 4B, the text part, and LFM2-1.2B, each as its config.json was published but for the end tokens.
"""


def known_shape(name: str) -> str:
    """The name itself. Raises SettingError, which names the nearest, where there is no such shape."""
    if name not in SHAPES:
        nearest = max(SHAPES, key=lambda each: SequenceMatcher(None, name.lower(), each.lower()).ratio())
        raise SettingError(f"there is no shape {name!r}; the nearest is {nearest}; known: {', '.join(SHAPES)}")
    return name


def config_text(name: str) -> str:
    """The config.json of a shape."""
    return json.dumps(SHAPES[name] | {"dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}, indent=1)


def write_config(name: str, folder: Path) -> Path:
    """A folder with the config.json of a shape and no weights, for contestants that draw them; any prompt of theirs fits."""
    target = folder / "dummy" / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(config_text(name), encoding="utf-8")
    return target
