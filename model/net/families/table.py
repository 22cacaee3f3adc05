"""The kinds of checkpoint that can be served: config.json -> ModelConfig, and the names of the weights. A file a family."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.gguf.paths import is_gguf
from attend.model.net.families import (
    arcee,
    attend,
    cohere2,
    deepseek,
    ernie,
    ernie4_5_moe,
    exaone,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    helium,
    hunyuan,
    latent,
    lfm2,
    lfm3,
    llama,
    minimax_m2,
    ministral,
    mixtral,
    multimodal,
    muse_glimmer,
    nanochat,
    nemotron,
    olmo,
    phi3,
    qwen3_5,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from attend.model.net.families.family import Family, Raw, refuse
from attend.model.net.families.positions import tell
from attend.model.net.families.unsupported_families import introduce
from attend.model.weights import read_json

MODULES = (
    *(arcee, attend, cohere2, deepseek, ernie, ernie4_5_moe, exaone, gemma, gemma4, glm4, glm4_moe, gpt2, gpt_neox, gpt_oss),
    *(granite, helium, hunyuan, latent, lfm2, lfm3, llama, minimax_m2, ministral, mixtral, muse_glimmer, nanochat, nemotron),
    *(olmo, phi3, qwen3_5, qwen_moe, seed_oss, smollm3, stablelm, starcoder2, multimodal),
)
FAMILIES: dict[str, Family] = {name: family for module in MODULES for name, family in module.FAMILIES.items()}
"""The families that are served, by `model_type`."""
TITLES = {
    "arcee": "Arcee AFM",
    "attend": "our own spelling: every mix of switches",
    "cohere": "Command R",
    "cohere2": "Command R7B",
    "deepseek_v2": "DeepSeek-V2 and V2-Lite",
    "deepseek_v3": "DeepSeek-V3, R1, and models of their shape",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5, without experts",
    "ernie4_5_moe": "ERNIE 4.5's mixtures",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, text alone",
    "gemma3_text": "Gemma 3's text model by itself",
    "gemma4": "Gemma 4, text alone",
    "gemma4_text": "its text model by itself",
    "gemma4_unified": "Gemma 4 12B, text alone",
    "gemma4_unified_text": "its text model by itself",
    "glm": "GLM-4-9B",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5, 4.5-Air, 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "gpt-oss, in bfloat16 and in MXFP4",
    "granite": "Granite 3",
    "granite_swa": "Granite with sliding windows",
    "granitemoe": "Granite 3's mixtures",
    "granitemoehybrid": "Granite 4 whose layers all have attention",
    "granitemoeshared": "Granite's mixtures with a shared expert",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunYuan, without experts",
    "lfm2": "LFM2, LFM2.5",
    "lfm2_moe": "their mixtures",
    "lfm3": "LFM3",
    "llama": "Llama 2 and 3, and models of their shape",
    "minicpm3": "MiniCPM3",
    "minimax_m2": "MiniMax-M2",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3's text model by itself",
    "mistral": "Mistral 7B",
    "mistral3": "Mistral Small 3.1 and later, Ministral 3, text alone",
    "mixtral": "Mixtral",
    "muse_glimmer": "Muse Glimmer, text alone",
    "nanochat": "nanochat",
    "nemotron": "Nemotron-4, Minitron",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo Hybrid",
    "olmoe": "OLMoE",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_5_vl": "Qwen2.5-VL, text alone",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen2_vl": "Qwen2-VL, text alone",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5, text alone",
    "qwen3_5_moe": "Qwen3.5's mixtures, text alone",
    "qwen3_5_moe_text": "their text models by themselves",
    "qwen3_5_text": "Qwen3.5's text model by itself",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl": "Qwen3-VL, text alone",
    "qwen3_vl_moe": "Qwen3-VL's mixtures, text alone",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM 2",
    "starcoder2": "StarCoder2",
    "vaultgemma": "VaultGemma",
    "youtu": "Youtu-LLM",
}
"""The models of each family, as people call them."""


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

    tables = (
        {ours: tuple(map(other, theirs)) for ours, theirs in table.items()}
        for table in (family.weights or {}, family.fused_tensors)
    )
    weights, fused = tables
    left_out = {other(name, ""): lacking for name, lacking in family.left_out.items()}
    return replace(family, prefix=prefix, weights=family.weights and weights, fused_tensors=fused, left_out=left_out)


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
