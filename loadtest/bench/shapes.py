"""The two random checkpoints that every benchmark uses, written by `transformers` so that all contestants read the same."""

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "S": {
        "vocab_size": 8192,
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 8,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
    "M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
"""S: 12.5M parameters in its blocks and embedding; M: 134.5M, the shape of SmolLM2-135M. Both Llama, tied, 2048 positions."""


def write_shape(name: str, folder: Path) -> Path:
    """The checkpoint folder of a shape in bfloat16, made at the first call."""
    target = folder / name
    if not (target / "config.json").is_file():
        _write(SHAPES[name], target)
    return target


def _write(sizes: dict[str, int], target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **special, max_position_embeddings=2048, tie_word_embeddings=True)
    net = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in net.named_parameters():
            if parameter.dim() == 2:  # spread, so that the argmax is not the same token for ever
                parameter.normal_(0, 0.02 if "embed" in parameter_name else 0.04)
    net.save_pretrained(target)
