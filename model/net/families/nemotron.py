"""Nemotron: LayerNorms with gains of 1 + w, a part of each head rotated, and an MLP of the square of ReLU."""

from attend.model.config import ModelConfig
from attend.model.net.families import arcee
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, number
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """The two biases are keys of their own."""
    bias = flag(raw, "attention_bias")
    return ModelConfig(
        **decoder_sizes({"hidden_act": "relu2", **raw})
        | rope(raw, head_size(raw), partial=0.5)
        | {
            "norm": "layernorm",
            "norm_eps": number(raw, "norm_eps", 1e-5),
            "gated_mlp": False,
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": flag(raw, "mlp_bias"),
        }
    )


FAMILIES = {"nemotron": Family(read, arcee.WEIGHTS, gain_offset=1.0)}
