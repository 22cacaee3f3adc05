"""SmolLM3: Llama without positions in every fourth layer."""

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import Family, Raw, decoder_sizes, flag, head_size, size, sliding_layers, windows
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """`no_rope_layers` holds a 1 for each layer that rotates."""
    count, bias = size(raw, "num_hidden_layers"), flag(raw, "attention_bias")
    interval = size(raw, "no_rope_layer_interval", 4)
    rotates = raw.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count or not all(type(one) is int and one in (0, 1) for one in rotates):
        raise CheckpointError(f"config.json: no_rope_layers must hold 0 or 1 for each of {count} layers; got {rotates!r}")
    layers = tuple(layer for layer in range(count) if rotates[layer])
    slides = flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None
    fields = decoder_sizes(raw, tied_head=True) | rope(raw, head_size(raw), theta=2e6)
    fields |= {"rope_layers": None if len(layers) == count else layers}
    fields |= {"qkv_bias": bias, "out_bias": bias, "mlp_bias": flag(raw, "mlp_bias")}
    if raw.get("layer_types") is not None or slides:
        fields |= windows(raw, raw.get("sliding_window"), sliding_layers(raw, lambda layer: slides and not rotates[layer]))
    return ModelConfig(**fields)


FAMILIES = {"smollm3": Family(read, llama.WEIGHTS)}
