"""Mixtral: Mistral with experts in place of its MLP, weighted by a softmax over the chosen ones."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, head_size, in_block, size, windows
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Read a Mixtral config.json; a sliding window, if given, holds in every layer."""
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5)
        | rope(raw, head_size(raw), theta=1e6)
        | windows(raw, raw.get("sliding_window"), None)
        | {
            "num_experts": size(raw, "num_local_experts", 8),
            "experts_per_token": size(raw, "num_experts_per_tok", 2),
            "routing": "chosen",
        }
    )


EXPERTS = {
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.gate_up": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    "mlp.experts.down": ("block_sparse_moe.experts.{e}.w2",),
}
FAMILIES = {"mixtral": Family(read, llama.OUTSIDE | in_block("model.layers", llama.PRE_NORMS | llama.ATTENTION | EXPERTS))}
