"""The kinds of checkpoint that can be served: config.json -> ModelConfig, and the names of the weights. A file a family."""

import re
from collections.abc import Sequence

from model.config import ModelConfig
from model.errors import CheckpointError
from model.net.families import (
    attend,
    cohere2,
    gemma,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mixtral,
    olmo,
    phi3,
    qwen3_5,
    qwen_moe,
    smollm3,
    starcoder2,
)
from model.net.families.reading import Family, Raw
from model.net.families.strangers import introduce

FAMILIES: dict[str, Family] = {
    **attend.FAMILIES,
    **cohere2.FAMILIES,
    **gemma.FAMILIES,
    **glm4.FAMILIES,
    **gpt2.FAMILIES,
    **gpt_neox.FAMILIES,
    **gpt_oss.FAMILIES,
    **granite.FAMILIES,
    **llama.FAMILIES,
    **mixtral.FAMILIES,
    **olmo.FAMILIES,
    **phi3.FAMILIES,
    **qwen3_5.FAMILIES,
    **qwen_moe.FAMILIES,
    **smollm3.FAMILIES,
    **starcoder2.FAMILIES,
}
"""By `model_type`."""


def family_of(raw: Raw) -> Family:
    """The family of a config.json, by its `model_type`."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported{introduce(kind)}; known: {known}")
    return FAMILIES[kind]


def their_names(family: Family, config: ModelConfig, ours: str) -> tuple[str, ...]:
    """The names under which a checkpoint of `family` holds our parameter `ours`, in the order of their rows in it."""
    if family.weights is None:
        return (ours,)
    template = re.sub(r"^blocks\.\d+\.", "blocks.{}.", ours)
    number = ours.split(".")[1]
    names = tuple(name.replace("{}", number) for name in family.weights[template])
    if "{e}" not in names[0]:
        return names
    return tuple(name.replace("{e}", str(expert)) for expert in range(config.num_experts or 0) for name in names)


def part_shapes(config: ModelConfig, ours: str, whole: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """The shapes of the parts of a parameter of shape `whole` that a checkpoint keeps in `parts` pieces.

    Matrices of all experts [experts, out, in] are either kept as they are, or laid under each other in pieces.
    """
    if parts == 1:
        return [tuple(whole)]
    if ".qkv." in ours:
        queries = config.query_size * (2 if config.attention_gate else 1)
        return [(rows, *whole[1:]) for rows in (queries, config.kv_size, config.kv_size)]
    if ".attention.inputs." in ours and config.delta is not None:
        return [(rows, *whole[1:]) for rows in (config.delta.channels, config.delta.value_width)]
    rows, shape = (whole[0] * whole[1], whole[2:]) if ".experts." in ours else (whole[0], whole[1:])
    return [(rows // parts, *shape)] * parts
