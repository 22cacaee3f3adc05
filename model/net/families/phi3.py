"""Phi-3 and Phi-4: Llama with one matrix for queries, keys and values, one for gate and up, and LongRoPE."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, head_size, in_block, size, windows
from attend.model.net.families.positions import ORIGINAL, rope


def read(raw: Raw) -> ModelConfig:
    """`su` and `yarn` are old names of LongRoPE here."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(key)
    if isinstance(values, dict) and values.get("rope_type", values.get("type")) in ("su", "yarn"):
        raw = raw | {key: {name: value for name, value in values.items() if name != "type"} | {"rope_type": "longrope"}}
    raw = raw | {ORIGINAL: size(raw, ORIGINAL, 4096)}
    fields = decoder_sizes(raw, eps=1e-5) | rope(raw, head_size(raw), partial=1.0)
    return ModelConfig(**fields | windows(raw, raw.get("sliding_window"), None))


FUSED = {
    "attention.qkv": ("self_attn.qkv_proj",),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_up_proj",),
    "mlp.down": ("mlp.down_proj",),
}
FAMILIES = {"phi3": Family(read, llama.OUTSIDE | in_block("model.layers", llama.PRE_NORMS | FUSED))}
