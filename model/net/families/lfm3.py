"""LFM3: short convolutions as LFM2's, layers with a window between them, and each head's output with a gate of its own."""

from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import lfm2
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    flag,
    in_block,
    layer_kinds,
    number,
    refuse,
    size,
    with_ends,
)
from attend.model.net.families.gemma import local_windows
from attend.model.net.families.positions import ORIGINAL, by_window, rope_of

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""RoPE of a config.json without `rope_parameters`."""


def read(raw: Raw) -> ModelConfig:
    """Read an LFM3 config.json. Without `layer_types`, two layers of four are convolutions, the first layer too."""
    kinds = layer_kinds(
        raw,
        ("conv", SLIDING, FULL),
        lambda layer: FULL if layer % 4 == 2 else SLIDING if layer % 4 == 0 and layer > 0 else "conv",
    )
    raw = with_ends(raw, 124894, 124900) | {
        "num_key_value_heads": size(raw, "num_key_value_heads", 4),
        "head_dim": size(raw, "head_dim", 128),
        "rms_norm_eps": number(raw, "rms_norm_eps", number(raw, "norm_eps", 1e-5)),
        "hidden_act": "silu",
    }
    bias = flag(raw, "attention_bias")
    return ModelConfig(
        **decoder_sizes(raw, tied_head=True)
        | _ropes(raw, kinds)
        | lfm2.convolutions(raw, kinds, 7)
        | local_windows(raw, raw.get("sliding_window", 256), tuple(at for at, kind in enumerate(kinds) if kind == SLIDING))
        | {
            "norm_place": "sandwich" if flag(raw, "use_sandwich_norm", True) else "pre",
            "head_gate": flag(raw, "use_attention_gate", True),
            "qk_norm": "head",
            "qkv_bias": bias,
            "out_bias": bias,
        }
    )


def _ropes(raw: Raw, kinds: list[str]) -> dict[str, Any]:
    """An object for each kind of layer with attention: that of a kind which no layer is of is not looked at."""
    refuse(raw, "partial_rotary_factor", None)
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or ROPES
    wanted = [kind for kind in ROPES if kind in kinds]
    if not isinstance(values, dict) or not all(isinstance(values.get(kind), dict) for kind in wanted):
        raise CheckpointError(f"config.json: rope_parameters must have {' and '.join(wanted)}; got {values!r}")
    found = {kind: _rope(raw, dict(values[kind])) for kind in wanted}
    return by_window(found[FULL], found[SLIDING]) if len(found) == 2 else next(iter(found.values()), {})


def _rope(raw: Raw, values: dict[str, Any]) -> dict[str, Any]:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        values.pop("partial_rotary_factor", None)  # all columns turn, whatever it says
    elif kind != "proportional":
        refuse(values, "partial_rotary_factor", None, 1.0)
    values.setdefault("rope_theta", number(raw, "rope_theta", 1e6))
    raw = {key: value for key, value in raw.items() if key != ORIGINAL}  # the objects of two kinds of layers do not look there
    return rope_of(raw, "rope_parameters", values, size(raw, "head_dim"))


BLOCK = lfm2.BLOCK | {
    "attention_post_norm": ("post_operator_norm",),
    "mlp_post_norm": ("post_ffn_norm",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "attention.gates": ("self_attn.g_proj",),
}
PUBLISHED = {"blocks.{}.attention.gates.weight": ("model.layers.{}.self_attn.gate_proj.weight",)}
FAMILIES = {"lfm3": Family(read, lfm2.WEIGHTS | in_block("model.layers", BLOCK), fused_tensors=PUBLISHED)}
