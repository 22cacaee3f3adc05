"""Helium: Llama whose queries and keys rotate neighbour with neighbour, without a bias on the attention output."""

from attend.model.config import ModelConfig
from attend.model.net.families import glm4, llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Read a Helium config.json. An absent `head_dim` means 128."""
    raw = {"num_key_value_heads": 20, "head_dim": 128, **raw}
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-8)
        | rope(raw, head_size(raw), theta=100000.0)
        | {"qkv_bias": flag(raw, "attention_bias"), "mlp_bias": flag(raw, "mlp_bias")}
    )


FAMILIES = {"helium": Family(read, llama.WEIGHTS, adapt=glm4.adapt)}
