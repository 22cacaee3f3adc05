"""Seed-OSS: Llama with a bias on queries, keys and values, and one of its own on the attention output."""

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Read Seed-OSS, whose biases are three keys of config.json."""
    raw = {"num_key_value_heads": 8, "head_dim": 128, **raw}
    biased = {"qkv_bias": flag(raw, "attention_bias", True), "out_bias": flag(raw, "attention_out_bias")}
    return ModelConfig(
        **decoder_sizes(raw) | rope(raw, head_size(raw)) | biased | {"mlp_bias": flag(raw, "mlp_bias")},
    )


FAMILIES = {"seed_oss": Family(read, llama.WEIGHTS)}
