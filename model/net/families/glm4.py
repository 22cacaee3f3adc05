"""GLM-4: half of each head rotated, neighbour with neighbour. The later models (glm4) norm before and after each sublayer."""

from typing import TYPE_CHECKING, Any

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, in_block
from attend.model.net.families.positions import rope

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor


def _common(raw: Raw) -> dict[str, Any]:
    """What both models read alike; absent stop tokens are GLM-4's."""
    raw = raw | {"head_dim": raw.get("head_dim") or 128, "num_key_value_heads": raw.get("num_key_value_heads") or 2}
    if raw.get("eos_token_id") is None:
        raw = raw | {"eos_token_id": [151329, 151336, 151338]}
    fields = decoder_sizes(raw, eps=1.5625e-7) | rope(raw, head_size(raw), partial=0.5)
    return fields | {"qkv_bias": flag(raw, "attention_bias", True)}


def halves(tensor: "Tensor", head: int, rotary_dim: int, first: int = 0) -> "Tensor":
    """Rows of queries or keys [heads * D, ...] whose pairs are (2i, 2i + 1), in the order in which pairs are (i, i + R / 2).

    Of a head R = `rotary_dim` rows are rotated, from the `first` on. Queries and keys change places alike,
    so their products stay.
    """
    last = first + rotary_dim
    order = [*range(first), *range(first, last, 2), *range(first + 1, last, 2), *range(last, head)]
    return tensor.unflatten(0, (-1, head))[:, order].flatten(0, 1)


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Reorder the rows of queries and keys: rotary pairs from neighbours to halves."""
    turned = name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj"))
    return halves(tensor, config.head_size, config.rope_size or config.head_size) if turned else tensor


NORMS = {
    "attention_norm": ("input_layernorm",),
    "attention_post_norm": ("post_self_attn_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_mlp_layernorm",),
}
MLP = {"mlp.gate_up": ("mlp.gate_up_proj",), "mlp.down": ("mlp.down_proj",)}
BLOCK = llama.OUTSIDE | in_block("model.layers", llama.ATTENTION | MLP)
FAMILIES = {
    "glm": Family(lambda raw: ModelConfig(**_common(raw)), BLOCK | in_block("model.layers", llama.PRE_NORMS), adapt=adapt),
    "glm4": Family(
        lambda raw: ModelConfig(**_common(raw) | {"norm_place": "sandwich"}),
        BLOCK | in_block("model.layers", NORMS),
        adapt=adapt,
    ),
}
