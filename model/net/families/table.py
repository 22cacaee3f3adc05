"""The kinds of checkpoint that can be served: config.json -> ModelConfig, and the names of the weights. A file a family."""

import re

from model.config import ModelConfig
from model.errors import CheckpointError
from model.net.families import attend, gemma, glm4, gpt2, granite, llama, olmo, phi3, smollm3
from model.net.families.reading import Family, Raw

FAMILIES: dict[str, Family] = {
    **attend.FAMILIES,
    **gemma.FAMILIES,
    **glm4.FAMILIES,
    **gpt2.FAMILIES,
    **granite.FAMILIES,
    **llama.FAMILIES,
    **olmo.FAMILIES,
    **phi3.FAMILIES,
    **smollm3.FAMILIES,
}
"""By `model_type`."""


def family_of(raw: Raw) -> Family:
    """The family of a config.json, by its `model_type`."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def their_names(family: Family, ours: str) -> tuple[str, ...]:
    """The names under which a checkpoint of `family` holds our parameter `ours`."""
    if family.weights is None:
        return (ours,)
    template = re.sub(r"^blocks\.\d+\.", "blocks.{}.", ours)
    number = ours.split(".")[1]
    return tuple(name.replace("{}", number) for name in family.weights[template])


def part_sizes(config: ModelConfig, ours: str, parts: int) -> list[int]:
    """Rows of each part of a parameter that a checkpoint keeps in `parts` pieces."""
    if parts == 1:
        return []
    return [config.query_size, config.kv_size, config.kv_size] if ".qkv." in ours else [config.mlp_size] * parts
