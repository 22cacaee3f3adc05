"""EXAONE 4: norms of a sublayer's output alone, and of each head of queries and keys.

Where there is a window, layers with it rotate, and the others have no positions.
"""

from attend.model.config import ModelConfig
from attend.model.net.families import olmo
from attend.model.net.families.family import Family, Raw, decoder_sizes, head_size, size, sliding_layers, windows_of_types
from attend.model.net.families.positions import rope


def read(raw: Raw) -> ModelConfig:
    """Read an EXAONE 4 config.json. Without `layer_types`, three layers of four have the window."""
    raw = {"num_key_value_heads": 32, "sliding_window": 4096, **raw}
    fields = decoder_sizes(raw, eps=1e-5) | rope(raw, head_size(raw)) | {"norm_place": "output", "qk_norm": "head"}
    if raw["sliding_window"] is None:
        return ModelConfig(**fields | windows_of_types(raw, None, lambda layer: False))
    pattern = 4 if raw.get("layer_types") is not None else size(raw, "sliding_window_pattern", 4)
    layers = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    rotates = None if len(layers) == fields["num_layers"] else layers
    slides = windows_of_types(raw, raw["sliding_window"], lambda layer: layer in layers)
    return ModelConfig(**fields | slides | {"rope_layers": rotates})


FAMILIES = {"exaone4": Family(read, olmo.WEIGHTS)}
