"""The random checkpoints that every benchmark uses, written by `transformers` so that all contestants read the same."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from attend.model.config import DEFAULT_MODEL

FOLDER = Path(tempfile.gettempdir()) / "attend-shapes"
PROMPT, OUTPUT, AT_ONCE, LONG = 128, 128, 16, 1024
"""W1: PROMPT -> OUTPUT tokens of one request; W2: of AT_ONCE; W3: a prompt of LONG tokens."""
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES: dict[str, dict[str, int]] = {
    "S": dict(zip(NAMES, (8192, 320, 864, 8, 5, 5), strict=True)),
    "M": dict(zip(NAMES, (49152, 576, 1536, 30, 9, 3), strict=True)),
    "L": dict(zip(NAMES, (151936, 896, 4864, 24, 14, 2), strict=True)),
    "Q": dict(zip(NAMES, (151936, 1024, 3072, 28, 16, 8), strict=True), head_dim=128),
    "1B": dict(zip(NAMES, (128256, 2048, 8192, 16, 32, 8), strict=True)),
    "8B": dict(zip(NAMES, (128256, 4096, 14336, 32, 32, 8), strict=True)),
}
"""S: 12.5M parameters; M: 134.5M, the sizes of SmolLM2-135M; L: 494M, those of Qwen2-0.5B; Q: 596M, those of Qwen3-0.6B;
1B: 1236M, those of Llama-3.2-1B; 8B: 7505M, those of Llama-3.1-8B, but tied. All Llama, tied.
"""


def parameters(shape: str) -> int:
    """Of its matrices."""
    sizes = SHAPES[shape]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim", hidden // heads)
    layer = hidden * (2 * head * (heads + sizes["num_key_value_heads"]) + 3 * sizes["intermediate_size"])
    return round(sizes["num_hidden_layers"] * layer + sizes["vocab_size"] * hidden)


def write_config(name: str, folder: Path = FOLDER) -> Path:
    """A folder with the config.json of a shape and no weights, for contestants that draw them; any prompt of theirs fits."""
    target = folder / "dummy" / name
    target.mkdir(parents=True, exist_ok=True)
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 1 << 14}
    (target / "config.json").write_text(json.dumps(SHAPES[name] | about | special), encoding="utf-8")
    return target


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
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **special, max_position_embeddings=2048, tie_word_embeddings=True)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in net.named_parameters():
            if parameter.dim() == 2:  # spread, so that the argmax is not the same token for ever
                parameter.normal_(0, 0.02 if "embed" in parameter_name else 0.04)
    net.save_pretrained(target)
