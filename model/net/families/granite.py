"""Granite: Llama with multipliers of the embedding, the residuals, the attention scores and the scores of the next token.

Its mixtures keep all experts in one tensor of each projection, and a shared expert has no gate. Granite 4 is served where every
layer has attention. Granite SWA has windows, sinks, and a theta for each layer besides.
"""

from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Fields,
    Raw,
    biases,
    count,
    flag,
    in_block,
    layer_thetas,
    number,
    refuse,
    size,
    windows_of_types,
)
from attend.model.net.families.mixtures import local_experts
from attend.model.net.families.positions import decoder


def _common(raw: Raw, *, eps: float = 1e-6, tied_head: bool = False) -> Fields:
    """`logits_scaling` divides; keywords are what absent keys mean."""
    scaling = number(raw, "logits_scaling", 1.0)
    if scaling <= 0:
        raise CheckpointError(f"config.json: logits_scaling must be a number above 0; got {scaling}")
    return (
        decoder(raw, eps=eps, tied_head=tied_head)
        | biases(raw)
        | {
            "embedding_scale": number(raw, "embedding_multiplier", 1.0),
            "attention_scale": number(raw, "attention_multiplier", 1.0),
            "residual_scale": number(raw, "residual_multiplier", 1.0),
            "logit_scale": 1 / scaling,
        }
    )


def granite(raw: Raw) -> Fields:
    """Granite 3: Llama with four multipliers."""
    return _common(raw) | {"mlp_bias": flag(raw, "mlp_bias")}


def _experts(raw: Raw, shared: int) -> Fields:
    """Fields of a mixture; `shared` is the width of its shared expert, 0 where there is none."""
    return local_experts(raw, 8, 2) | ({"shared_expert_size": shared, "shared_expert_gate": False} if shared else {})


def hybrid(raw: Raw) -> Fields:
    """Granite 4. Without experts the shared one is the MLP. Most models do not rotate."""
    kinds, layers = raw.get("layer_types", raw.get("layers_block_type")), size(raw, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ATTENTION for kind in kinds):
        named = f"layer_types must name attention for each of {layers} layers: Mamba layers are not supported"
        raise CheckpointError(f"config.json: {named}; got {kinds!r}")
    refuse(raw, "position_embedding_type", None, "nope", "rope")
    shared, mixed = size(raw, "shared_intermediate_size", 1024), count(raw, "num_local_experts", 8) > 0
    mlp = _experts(raw, shared) if mixed else {"mlp_size": shared}
    return _common(raw) | mlp | {"rope_layers": None if raw.get("position_embedding_type") == "rope" else ()}


def swa(raw: Raw) -> Fields:
    """Granite SWA. Without `layer_types`, all layers but every fourth have the window, from the second on."""
    raw = {"num_key_value_heads": 4, **raw}
    slides = windows_of_types(raw, raw.get("sliding_window", 128), lambda layer: layer % 4 != 0)
    fields = _common(raw, eps=1e-5, tied_head=True) | {"mlp_bias": flag(raw, "mlp_bias"), "sinks": True}
    return fields | slides | {"rope_thetas": layer_thetas(raw)}


ATTENTION = ("attention", "full_attention")
IN_BLOCK = {
    "mlp.router": ("block_sparse_moe.router.layer",),
    "mlp.experts.gate_up": ("block_sparse_moe.input_linear",),
    "mlp.experts.down": ("block_sparse_moe.output_linear",),
    "mlp.shared.gate_up": ("shared_mlp.input_linear",),
    "mlp.shared.down": ("shared_mlp.output_linear",),
    "mlp.gate_up": ("shared_mlp.input_linear",),
    "mlp.down": ("shared_mlp.output_linear",),
}
WEIGHTS = llama.WEIGHTS | in_block("model.layers", IN_BLOCK)
FAMILIES = {
    "granite": Family(granite, llama.WEIGHTS),
    "granite_swa": Family(swa, llama.WEIGHTS | llama.SINKS),
    "granitemoe": Family(lambda raw: _common(raw) | _experts(raw, 0), WEIGHTS),
    "granitemoehybrid": Family(hybrid, WEIGHTS),
    "granitemoeshared": Family(lambda raw: _common(raw) | _experts(raw, count(raw, "shared_intermediate_size", 0)), WEIGHTS),
}
