"""ERNIE 4.5's mixture: a corrected softmax chooses experts, the shared ones have no gate, and neighbours rotate together."""

import re

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import glm4, glm4_moe
from attend.model.net.families.family import MTP, Family, Raw, count, decoder_sizes, head_size, number, refuse, size, with_ends
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Experts have no bias where the rest has one, which is refused."""
    refuse(raw, "use_bias", None, False)
    raw = {"num_experts": 64, "num_experts_per_tok": 6, "num_key_value_heads": 4, **with_ends(raw, 1, 2)}
    width, shared = size(raw, "moe_intermediate_size", 1536), count(raw, "moe_num_shared_experts", 2)
    return ModelConfig(
        **decoder_sizes(raw, eps=1e-5, tied_head=True)
        | rope(raw, head_size(raw), theta=500000.0)
        | {
            "num_experts": size(raw, "moe_num_experts", raw["num_experts"]),
            "experts_per_token": size(raw, "moe_k", raw["num_experts_per_tok"]),
            "expert_size": width,
            "expert_layers": expert_layers(raw),
            "shared_expert_size": width * shared or None,
            "shared_expert_gate": False,
            "score_correction": True,
            "routing": "chosen",
            "routing_floor": number(raw, "moe_norm_min", 1e-12) or None,
        }
    )


def expert_layers(raw: Raw) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer from the first on to the last; an end of -1 is the model's."""
    layers, every = size(raw, "num_hidden_layers"), size(raw, "moe_layer_interval", 1)
    first = count(raw, "moe_layer_start_index", 1)
    last = raw.get("moe_layer_end_index", -1)
    if not isinstance(last, int) or isinstance(last, bool):
        raise CheckpointError(f"config.json: moe_layer_end_index must be an integer; got {last!r}")
    last = layers - 1 if last == -1 else last
    return tuple(layer for layer in range(layers) if (layer + 1) % every == 0 and first <= layer <= last)


CORRECTION = {"blocks.{}.mlp.correction": ("model.layers.{}.mlp.moe_statics.e_score_correction_bias",)}
ERNIE = Family(
    read,
    glm4_moe.WEIGHTS | CORRECTION,
    adapt=glm4.adapt,
    rows=re.compile(r"\.correction$"),
    left_out=dict.fromkeys(("model.mtp_", "mtp_"), MTP),
)
FAMILIES = {"ernie4_5_moe": ERNIE}
