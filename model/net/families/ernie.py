"""ERNIE 4.5 without experts: Llama whose queries and keys rotate neighbour with neighbour."""

from attend.model.config import ModelConfig
from attend.model.net.families import glm4, llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """`use_bias` holds for all matrices."""
    raw = {"num_key_value_heads": 2, "head_dim": 128, **raw}
    bias = flag(raw, "use_bias")
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5, tied_head=True)
        | rope(raw, head_size(raw), theta=500000.0)
        | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    )


FAMILIES = {"ernie4_5": Family(read, llama.WEIGHTS, adapt=glm4.adapt)}
