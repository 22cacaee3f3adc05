"""`attend inspect`: what a checkpoint is and what memory serving it takes, without reading its weights."""

import json
from pathlib import Path
from typing import Any

import torch

from attend.model.config import MemoryGroup, ModelConfig
from attend.model.devices import DTYPES
from attend.model.engine.build import size_engine
from attend.model.engine.options import EngineOptions
from attend.model.net.checkpoint import inspect, makes_text, open_weights, quantised_decoder
from attend.model.net.quantised import count_bytes
from attend.model.parallel.shards import check_shards
from attend.model.text.chat import ChatTemplate
from attend.service.runtime import hub
from attend.service.runtime.checkpoint import read_tokenizer
from attend.service.settings import Settings

GIB = 1 << 30
WORDS = {
    **{"num_layers": "layers", "num_heads": "query heads", "num_kv_heads": "key/value heads", "vocab_size": "vocabulary"},
    **{"max_model_len": "context", "makes_text": "generates text", "kv_int8": "int8 KV cache", "weights_bytes": "weights"},
    **{"kv_bytes_per_token": "KV cache per token", "kv_bytes_per_token_past_windows": "beyond windows"},
    **{"state_bytes": "states per request", "kv_tokens_in_gib": "tokens in 1 GiB", "requests_in_gib": "requests in 1 GiB"},
}
"""How a person reads the names of the JSON object; others as they are."""


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """All that is known of a checkpoint; sizes in bytes. Raises CheckpointError where it cannot be served."""
    config, net = inspect(folder), quantised_decoder(folder)
    return {
        "supported": True,
        "folder": str(folder),
        **_shape(config),
        "makes_text": makes_text(folder),
        "parameters": net.num_parameters,
        **_on_disk(folder),
        "memory": {name: _memory(config, count_bytes(net, dtype), dtype) for name, dtype in DTYPES.items()},
        "kv_int8": _cache(config, torch.int8),
        "tokenizer": _tokenizer(folder, config),
        "chat_template": ChatTemplate.load(folder) is not None,
    }


def show(settings: Settings, *, as_json: bool) -> None:
    """Print the facts for a person, or as one JSON object. Raises CheckpointError where it cannot be served, and SettingError
    where the ranks of `tensor_parallel` cannot share it.
    """
    settings = hub.with_folder(settings)
    check_shards(inspect(settings.folder), settings.tensor_parallel)
    found = checkpoint_facts(settings.folder)
    if as_json:
        print(json.dumps(found))
    else:
        rows = lines(found)
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}} {text}" for name, text in rows))


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of a checkpoint as lines: (name, value)."""
    memory = {f"memory_{dtype}": each for dtype, each in facts["memory"].items()}
    shown = {name: value for name, value in (facts | memory).items() if name not in ("supported", "memory")}
    return [(_label(name), _in_words(name, value)) for name, value in shown.items()]


def _label(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_label(key)} {_in_words(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if name == "format" and value is None:
        return "safetensors, not quantised"
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in name:
        return _size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shape(config: ModelConfig) -> dict[str, Any]:
    names = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "vocab_size", "norm", "positions")
    whole = next((layer for layer in config.layers if layer.recurrence is None and layer.attention.window is None), None)
    own = {} if whole is None else {"num_kv_heads": whole.num_kv_heads, "head_size": whole.head_size}
    differ = any(getattr(config, name) != size for name, size in own.items())
    return (
        {name: getattr(config, name) for name in names}
        | ({"global_heads": own} if differ else {})
        | {
            "mlp": {"size": config.mlp_size, "activation": config.activation, "gated": config.gated_mlp},
            "tied_head": config.tied_head,
            "max_model_len": config.default_context,
        }
    )


def _on_disk(folder: Path) -> dict[str, Any]:
    """The files that hold weights, in what, and how they are quantised."""
    with open_weights(folder) as weights:
        files = {"files": len(weights.files), "bytes": weights.size, "dtypes": sorted(weights.dtypes())}
        return {"weights": files, "format": weights.title}


def _memory(config: ModelConfig, weights: int, dtype: torch.dtype) -> dict[str, int]:
    """What a server with the default settings takes, in bytes, and what it holds in a cache of one GiB. `weights`: bytes."""
    return {"weights_bytes": weights, **_cache(config, dtype)}


def _cache(config: ModelConfig, kv_dtype: torch.dtype) -> dict[str, int]:
    size = kv_dtype.itemsize
    sized = size_engine(config, kv_dtype, "cpu", EngineOptions(kv_cache_memory=GIB))
    return {
        "kv_bytes_per_token": config.kv_bytes_per_token(size),
        "kv_bytes_per_token_past_windows": sum(config.block_bytes(group, 1, size) for group in _keeping_all(config)),
        "state_bytes": config.state_bytes,
        "kv_tokens_in_gib": sized.num_blocks * sized.block_size,
        "requests_in_gib": sized.max_batch_requests,
    }


def _keeping_all(config: ModelConfig) -> list[MemoryGroup]:
    """The groups of layers that keep the keys and values of every token."""
    context = config.default_context
    return [group for group in config.memory_groups if not group.has_state and (group.window or context) >= context]


def _tokenizer(folder: Path, config: ModelConfig) -> dict[str, Any]:
    tokenizer = read_tokenizer(folder, config.vocab_size)
    start = config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return {
        "kind": type(tokenizer.raw.model).__name__,
        "size": tokenizer.size,
        "bos_token": None if start is None else tokenizer.raw.id_to_token(start),
        "eos_tokens": [tokenizer.raw.id_to_token(token) for token in config.eos_token_ids],
    }


def _size(count: float) -> str:
    """A number of bytes as a person reads it: 24.0 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
