"""StarCoder2: LayerNorm, biases everywhere, and an MLP without a gate."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, in_block, number, windows
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Read a StarCoder2 config.json; a sliding window, if given, holds in every layer."""
    bias = flag(raw, "use_bias", True)
    return ModelConfig(
        **decoder_sizes(raw | {"hidden_act": raw.get("hidden_act") or "gelu_pytorch_tanh"}, tied_head=True)
        | rope(raw, head_size(raw))
        | windows(raw, raw.get("sliding_window"), None)
        | {"norm": "layernorm", "norm_eps": number(raw, "norm_epsilon", 1e-5), "gated_mlp": False}
        | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    )


MLP = {"mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", llama.PRE_NORMS | llama.ATTENTION | MLP)
FAMILIES = {"starcoder2": Family(read, WEIGHTS)}
