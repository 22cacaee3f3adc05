"""Shapes of models with random weights, for measurements: a name stands for a config.json of Llama's family."""

import json
from pathlib import Path

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


def write_config(name: str, folder: Path) -> Path:
    """A folder with the config.json of a shape and no weights, for contestants that draw them; any prompt of theirs fits."""
    target = folder / "dummy" / name
    target.mkdir(parents=True, exist_ok=True)
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 1 << 14}
    (target / "config.json").write_text(json.dumps(SHAPES[name] | about | special), encoding="utf-8")
    return target
