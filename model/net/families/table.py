"""The kinds of checkpoint that can be served: config.json -> ModelConfig, and the names of the weights. A file a family."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.gguf.paths import is_gguf
from attend.model.net.families import (
    attend,
    dense,
    gemma,
    gemma4,
    gpt,
    granite,
    latent,
    lfm,
    llama,
    mixtures,
    multimodal,
    muse_glimmer,
    olmo,
    qwen3_5,
)
from attend.model.net.families.family import Family, Names, Raw, refuse
from attend.model.net.families.positions import tell
from attend.model.net.families.unsupported_families import introduce
from attend.model.weights import read_json

MODULES = (attend, dense, gemma, gemma4, gpt, granite, latent, lfm, llama, mixtures, multimodal, muse_glimmer, olmo, qwen3_5)
FAMILIES: dict[str, Family] = {name: family for module in MODULES for name, family in module.FAMILIES.items()}
"""The families that are served, by `model_type`."""


def family_of(raw: Raw) -> Family:
    """The family of a config.json, by its `model_type`."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported{introduce(kind)}; known: {known}")
    return FAMILIES[kind]


def their_names(family: Family, config: ModelConfig, ours: str) -> tuple[str, ...]:
    """The names under which a checkpoint of `family` holds our parameter `ours`, in the order of their rows in it."""
    if family.weights is None:
        return (ours,)
    template = re.sub(r"^blocks\.\d+\.", "blocks.{}.", ours)
    number = ours.split(".")[1]
    names = tuple(name.replace("{}", number) for name in family.weights.get(ours) or family.weights[template])
    if ".attention.qkv." in ours:
        return names[: len(names) - 2 + len(config.layer(int(number)).kv_projections)]
    if "{e}" not in names[0]:
        return names
    count = config.num_heads if ".attention.kv_up." in ours else config.num_experts or 0
    return tuple(name.replace("{e}", str(expert)) for expert in range(count) for name in names)


def spellings(family: Family) -> list[str]:
    """The prefixes that names of a checkpoint may have: that of the family, some of its parts, or an older one."""
    found = [""]
    for part in re.findall(r"[^.]+\.", family.prefix):
        found = [start + more for more in (part, "") for start in found]
    return [*found, *family.older]


def spelling_of(family: Family, names: Iterable[str]) -> str:
    """The prefix of a checkpoint's names; the family's own where there is none of them. CheckpointError where there are two."""
    entries = [*(family.weights or {}).values(), *family.fused_tensors.values()]
    firsts = {
        name.removeprefix(family.prefix).split(".")[0]
        for theirs in entries
        for name in theirs
        if name.startswith(family.prefix)
    }
    found: dict[str, str] = {}
    for name in names:
        for spelling in spellings(family):
            if name.startswith(spelling) and name.removeprefix(spelling).split(".")[0] in firsts:
                found.setdefault(spelling, name)
    if len(found) > 1:
        raise CheckpointError(
            f"tensors {' and '.join(found.values())} have names of two kinds, with and without {family.prefix!r}"
        )
    return next(iter(found), family.prefix)


def with_prefix(family: Family, prefix: str) -> Family:
    """The family with another prefix of its names."""

    def other(name: str, outside: str = family.older.get(prefix, "")) -> str:
        return prefix + name.removeprefix(family.prefix) if name.startswith(family.prefix) else outside + name

    def rename_all(table: Mapping[str, tuple[str, ...]]) -> Names:
        return {ours: tuple(map(other, theirs)) for ours, theirs in table.items()}

    weights, fused = family.weights and rename_all(family.weights), rename_all(family.fused_tensors)
    left_out = {other(name, ""): lacking for name, lacking in family.left_out.items()}
    return replace(family, prefix=prefix, weights=weights, fused_tensors=fused, left_out=left_out)


def named_layers(family: Family, config: ModelConfig) -> Family:
    """The family with the number of the first layer behind the last one in the names of what is left out."""
    return replace(
        family, left_out={name.replace("{}", str(config.num_layers)): lacking for name, lacking in family.left_out.items()}
    )


def part_shapes(config: ModelConfig, ours: str, whole: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """The shapes of the parts of a parameter of shape `whole` that a checkpoint keeps in `parts` pieces.

    Matrices of all experts [experts, out, in] are either kept as they are, or laid under each other in pieces.
    """
    if parts == 1:
        return [tuple(whole)]
    if ".qkv." in ours:
        layer = config.layer(int(ours.split(".")[1]))
        kv = layer.kv_projections
        queries = [layer.query_size * (2 if config.attention_gate and parts == 1 + len(kv) else 1)] * (parts - len(kv))
        return [(rows, *whole[1:]) for rows in (*queries, *kv)]
    if config.delta is not None and (".attention.inputs." in ours or ours.endswith(".attention.convolution")):
        widths = [config.delta.query_width] * 2 + [config.delta.value_width] * 2
        return [(rows, *whole[1:]) for rows in ([config.delta.channels, widths[-1]] if parts == 2 else widths[:parts])]
    if ".attention.kv_up." in ours and config.latent is not None:
        return [(rows, *whole[1:]) for rows in (config.latent.key_size, config.latent.value_size)] * config.num_heads
    rows, shape = (whole[0] * whole[1], whole[2:]) if ".experts." in ours else (whole[0], whole[1:])
    return [(rows // parts, *shape)] * parts


def config_of(folder: Path) -> ModelConfig:
    """The config of a model by its config.json alone, without torch. Raises CheckpointError."""
    raw = read_json(folder, "config.json")
    try:
        return read_checked(family_of(raw), raw)
    except CheckpointError as error:
        if is_gguf(folder):
            raise CheckpointError(f"{folder}: its metadata as a config.json: {error}") from error
        raise


EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False, "vision"),  # which is that of the tokens of images
}
"""Keys that change what any family computes, with their values that change nothing."""


def read_checked(family: Family, raw: Raw) -> ModelConfig:
    """The config of a model. A value of the wrong type deep in the file is the file's fault, not ours: CheckpointError."""
    text = raw.get("text_config") or raw
    try:
        for place in (raw, text):
            for key, harmless in EVERYWHERE.items():
                refuse(place, key, *harmless)
            if not raw["model_type"].startswith("gemma4"):
                refuse(place, "per_layer_config", None, {})
        config = family.read(raw)
        _check_layer_types(config, text)
        return config
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"config.json has a value of the wrong type: {error}") from error


def _check_layer_types(config: ModelConfig, text: Raw) -> None:
    """Refuse kinds of layers that this family does not have: not all of them look at `layer_types`. A window that none of them
    looks at is passed over.
    """
    kinds, window = text.get("layer_types"), text.get("sliding_window")
    if not isinstance(kinds, list | None):
        raise CheckpointError(f"config.json: layer_types must be a list; got {kinds!r}")
    if config.delta_layers or config.conv_layers:  # whose readers look at it
        return
    slides, wide = config.sliding_window is not None, not isinstance(window, int) or window >= config.max_positions
    seen = {"full_attention", "attention"} | ({"sliding_attention"} if slides or (wide and window) else set())
    if others := sorted({str(kind) for kind in kinds or []} - seen):
        raise CheckpointError(f"config.json: layer_types name {', '.join(others)}: {config.family} has no such layers")
    if not slides and not wide and text.get("use_sliding_window") is not False:
        tell(f"config.json has sliding_window = {window}, which model_type {config.family!r} does not use: ignored")
