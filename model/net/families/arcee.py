"""Arcee's AFM: Llama with an MLP without a gate, whose activation is the square of ReLU."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, in_block
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """The two biases are keys of their own."""
    raw = {"hidden_act": "relu2", **raw}
    bias = flag(raw, "attention_bias")
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5)
        | rope(raw, head_size(raw))
        | {"gated_mlp": False, "qkv_bias": bias, "out_bias": bias, "mlp_bias": flag(raw, "mlp_bias")}
    )


MLP = {"mlp.up": ("mlp.up_proj",), "mlp.down": ("mlp.down_proj",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", llama.PRE_NORMS | llama.ATTENTION | MLP)
FAMILIES = {"arcee": Family(read, WEIGHTS)}
