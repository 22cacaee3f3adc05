"""Muse Glimmer, text alone: norms before and after each sublayer, gated attention, and norms without gain of queries and keys.

Gains in blocks are 1 + w. The vectors of tokens are normed, which is done once, as they are read. Some layers have a window,
and some have no positions.
"""

import re

from attend.model.net.families import llama
from attend.model.net.families.family import POSITIONS, Family, Fields, Raw, layer_thetas, number, refuse, windows_of_types
from attend.model.net.families.multimodal import IMAGES, PREFIX, text_of
from attend.model.net.families.positions import decoder


def muse_glimmer(raw: Raw) -> Fields:
    """The text model in `text_config`. Counted from the last layer, every fourth has neither a window nor positions."""
    text = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": POSITIONS["muse_glimmer"], **text_of(raw)}
    text["tie_word_embeddings"] = raw.get("tie_word_embeddings")
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse(text, key, None, False)
    fields = decoder(text | {"hidden_act": text.get("hidden_activation", "silu")}, eps=1e-5)
    count, thetas = fields["num_layers"], layer_thetas(text)
    fourth = [(count - 1 - layer) % 4 != 0 for layer in range(count)]
    turned = fourth if thetas is None else thetas  # of a theta only whether it is 0 changes anything
    return (
        fields
        | windows_of_types(text, text.get("sliding_window", 2048), lambda layer: fourth[layer])
        | {
            "rope_layers": tuple(layer for layer, turns in enumerate(turned) if turns),
            "norm_place": "sandwich",
            "post_norm_eps": number(text, "post_norm_eps", 1e-8),
            "qk_norm": "head",
            "attention_gate": True,
            "attention_scale": number(text, "qk_scale_factor", 3.87) * fields["head_size"] ** -0.5,
            "logit_scale": number(text, "output_multiplier", 0.19611613513818404),
            "logit_softcap": number(text, "final_logit_softcapping", 20.0),
        }
    )


QKV = {"attention.qkv": tuple(f"self_attn.{name}_proj" for name in ("q", "gate", "k", "v"))}
TOWERS = ("vision_tower.", "vision_adapter.", "vision_projection.", "perception_emb_norm.")
FAMILIES = {
    "muse_glimmer": Family(
        muse_glimmer,
        llama.weights(llama.SANDWICH, QKV, prefix=PREFIX),
        adapt=llama.normed_vectors,
        gain_offset=1.0,
        offset_gains=re.compile(r"^blocks\..*norm\.weight$"),
        gainless=re.compile(r"\.[qk]_norm\.weight$"),
        prefix=PREFIX,
        left_out={start + name: IMAGES for name in TOWERS for start in ("model.", "")},
    )
}
