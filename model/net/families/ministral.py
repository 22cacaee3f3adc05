"""Ministral: Mistral with a window in some layers. Ministral 3: Mistral whose queries grow with their positions."""

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families import llama
from attend.model.net.families.family import (
    Family,
    Raw,
    decoder_sizes,
    head_size,
    need,
    number,
    size,
    windows,
    windows_of_types,
)
from attend.model.net.families.positions import ORIGINAL, original_positions, rope

BETA = "llama_4_scaling_beta"
YARN = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1}


def read(raw: Raw) -> ModelConfig:
    """Read a Ministral config.json. Without `layer_types`, every layer has the window."""
    raw = {"num_key_value_heads": 8, **raw}
    slides = windows_of_types(raw, raw.get("sliding_window", 4096), lambda layer: True)
    return ModelConfig(**decoder_sizes(raw) | rope(raw, head_size(raw)) | slides)


def read3(raw: Raw) -> ModelConfig:
    """Read a Ministral 3 config.json. An absent `rope_parameters` means the released models' YaRN."""
    raw = {"num_key_value_heads": 8, "head_dim": 128, **raw}
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = YARN if raw.get(key) is None else raw[key]
    if not isinstance(values, dict):
        raise CheckpointError(f"config.json: {key} must be an object; got {values!r}")
    beta = number({BETA: need(values, BETA)}, BETA, 0.0)
    kind = values.get("rope_type", values.get("type", "default"))
    length = original_positions(raw, values) if kind in ("llama3", "yarn", "longrope") else size(values, ORIGINAL)
    others = {name: value for name, value in values.items() if name not in (BETA, "max_position_embeddings")}
    scale = {"query_scale_beta": beta, "query_scale_length": length} if beta else {}
    fields = decoder_sizes(raw, eps=1e-5) | rope({**raw, key: others}, head_size(raw)) | scale
    return ModelConfig(**fields | windows(raw, raw.get("sliding_window"), None))


FAMILIES = {"ministral": Family(read, llama.WEIGHTS), "ministral3": Family(read3, llama.WEIGHTS)}
