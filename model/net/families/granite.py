"""Granite: Llama with multipliers of the embedding, the residuals, the attention scores and the scores of the next token."""

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.positions import rope
from attend.model.net.families.reading import Family, Raw, decoder_sizes, flag, head_size, number


def read(raw: Raw) -> ModelConfig:
    """`logits_scaling` divides."""
    bias, scaling = flag(raw, "attention_bias"), number(raw, "logits_scaling", 1.0)
    if scaling <= 0:
        raise CheckpointError(f"config.json: logits_scaling must be a number above 0; got {scaling}")
    return ModelConfig(
        **decoder_sizes(raw)
        | rope(raw, head_size(raw))
        | {
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": flag(raw, "mlp_bias"),
            "embedding_scale": number(raw, "embedding_multiplier", 1.0),
            "attention_scale": number(raw, "attention_multiplier", 1.0),
            "residual_scale": number(raw, "residual_multiplier", 1.0),
            "logit_scale": 1 / scaling,
        }
    )


FAMILIES = {"granite": Family(read, llama.WEIGHTS)}
