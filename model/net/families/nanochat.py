"""nanochat: norms without gain, after the rotation too, which turns the other way, and an MLP of the square of ReLU.

The vectors of tokens are normed, which is done once, as they are read.
"""

import re
from typing import TYPE_CHECKING

from attend.model.config import ModelConfig
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, in_block, optional_number, refuse
from attend.model.net.families.muse_glimmer import normed_vectors
from attend.model.net.families.positions import rope

if TYPE_CHECKING:  # a config is read without torch
    from torch import Tensor


def read(raw: Raw) -> ModelConfig:
    """Read a nanochat config.json; a tied head is refused, since the embedding's vectors are normed."""
    refuse(raw, "tie_word_embeddings", None, False)
    bias = flag(raw, "attention_bias")
    return ModelConfig(
        **decoder_sizes({"hidden_act": "relu2", **raw})
        | rope(raw, head_size(raw))
        | {
            "qk_norm": "head",
            "qk_norm_after_rope": True,
            "gated_mlp": False,
            "qkv_bias": bias,
            "out_bias": bias,
            "logit_softcap": optional_number(raw, "final_logit_softcapping", 15.0),
        }
    )


def adapt(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    """Heads of queries and keys with their halves swapped, which turn as others do: scores stay."""
    if name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return tensor.unflatten(0, (-1, 2, config.head_size // 2)).flip(1).flatten(0, 2)
    return normed_vectors(config, name, tensor)


MLP = {"mlp.up": ("mlp.fc1",), "mlp.down": ("mlp.fc2",)}
WEIGHTS = llama.OUTSIDE | in_block("model.layers", llama.ATTENTION | MLP)
FAMILIES = {"nanochat": Family(read, WEIGHTS, adapt=adapt, gainless=re.compile(r"norm\.weight$"))}
