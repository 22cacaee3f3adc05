"""The random checkpoints that every benchmark uses, written by `transformers` so that all contestants read the same."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from attend.model.config import DEFAULT_MODEL
from attend.model.shapes import SHAPES

FOLDER = Path(tempfile.gettempdir()) / "attend-shapes"
PROMPT, OUTPUT, AT_ONCE, LONG = 128, 128, 16, 1024
"""W1: PROMPT -> OUTPUT tokens of one request; W2: of AT_ONCE; W3: a prompt of LONG tokens."""


def parameters(shape: str) -> int:
    """Of its matrices."""
    sizes = SHAPES[shape]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim", hidden // heads)
    layer = hidden * (2 * head * (heads + sizes["num_key_value_heads"]) + 3 * sizes["intermediate_size"])
    return round(sizes["num_hidden_layers"] * layer + sizes["vocab_size"] * hidden)


def write_shape(name: str, folder: Path = FOLDER) -> Path:
    """The checkpoint folder of a shape in bfloat16, made at the first call, with the default model's tokenizer."""
    target = folder / name
    if not (target / "config.json").is_file():
        _write(SHAPES[name], target)
    if not (target / "tokenizer_config.json").is_file():
        shutil.copy(DEFAULT_MODEL / "tokenizer.json", target)
        special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
        (target / "tokenizer_config.json").write_text(json.dumps(about | special), encoding="utf-8")
    return target


def _write(sizes: dict[str, int], target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    about: dict[str, Any] = sizes | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(**about, max_position_embeddings=2048, tie_word_embeddings=True)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in net.named_parameters():
            if parameter.dim() == 2:  # spread, so that the argmax is not the same token for ever
                parameter.normal_(0, 0.02 if "embed" in parameter_name else 0.04)
    net.save_pretrained(target)
