"""Text models of vision-language models: `text_config` has their config, and `model.language_model.` their tensors.

The other tensors are left out.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attend.model.errors import CheckpointError
from attend.model.net.families import dense, gemma, llama, mixtures
from attend.model.net.families.family import POSITIONS, Family, Fields, Raw, head_size_of, refuse, size
from attend.model.net.families.positions import rope_type

MROPE = {"mrope_section", "mrope_interleaved"}
"""How positions of images are spread over a head: those of a text are the same in each part."""
PREFIX = "model.language_model."
IMAGES = "images and videos are not served"
TOWERS = ("vision_tower.", "multi_modal_projector.")
LEFT_OUT = {start + name: IMAGES for name in TOWERS for start in ("model.", "")}
VISUAL = dict.fromkeys(("model.visual.", "visual."), IMAGES)


def text_of(raw: Raw) -> dict[str, Any]:
    """The text model's keys, without what its rope says of images. Keys beside it hold for it as well."""
    text = raw.get("text_config") or raw
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config must be an object; got {text!r}")
    outer = ("model_type", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    text = text | {key: raw[key] for key in outer if raw.get(key) is not None}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(key), dict):
            text = text | {key: {name: value for name, value in text[key].items() if name not in MROPE}}
    return text


def _as(kind: str, text: dict[str, Any], reader: Callable[[Raw], Fields]) -> Fields:
    """What the reader of `model_type` `kind` makes of the text model."""
    return reader({**text, "model_type": kind}) | {"family": text["model_type"]}


def _with(raw: Raw, *, tied_head: bool = False, **absent: Any) -> dict[str, Any]:
    """The text model's keys, and what absent ones mean. The head is tied by the key beside it alone."""
    ties = raw["tie_word_embeddings"] if raw.get("tie_word_embeddings") is not None else tied_head
    positions = POSITIONS[raw["model_type"]]
    return {"max_position_embeddings": positions, **absent, **text_of(raw), "tie_word_embeddings": ties}


def gemma3(raw: Raw) -> Fields:
    """Gemma 3. Published configs leave out what is as in its smallest model. Its reference caps no scores of the next token."""
    sizes = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    text = _with(raw, tied_head=True, **sizes, **heads)
    return _as("gemma3_text", text | {"final_logit_softcapping": None}, gemma.gemma3)


def mistral3(raw: Raw) -> Fields:
    """Mistral Small 3.1 and later, and the Ministral 3 models."""
    inner = (raw.get("text_config") or {}).get("model_type", "mistral")
    readers = {"mistral": llama.read, "ministral3": dense.ministral3}
    if inner not in readers:
        known = ", ".join(readers)
        raise CheckpointError(f"config.json: text_config: model_type {inner!r} is not supported; known: {known}")
    absent = {"max_position_embeddings": POSITIONS[inner], "num_key_value_heads": 8}
    return _as(inner, _with(raw, tied_head=True, **absent), readers[inner])


def qwen2_vl(raw: Raw) -> Fields:
    """Qwen2-VL and Qwen2.5-VL. Older configs have the text model's keys beside those of images. Either may tie the head."""
    absent = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    text = _with(raw, **absent)
    refuse(text, "head_dim", None, head_size_of(text, "hidden_size", "num_attention_heads"))
    text["tie_word_embeddings"] |= (raw.get("text_config") or {}).get("tie_word_embeddings") is True
    for key in ("rope_parameters", "rope_scaling"):
        values = text.get(key)
        if isinstance(values, dict) and rope_type(values) == "mrope":
            text[key] = {name: value for name, value in values.items() if name != "type"} | {"rope_type": "default"}
    return _as("qwen2", text, llama.read)


def qwen3_vl(raw: Raw) -> Fields:
    """Read the text model of a Qwen3-VL config.json; it has no sliding window."""
    text = _with(raw, num_key_value_heads=32, head_dim=128, rope_theta=500000.0)
    return _as("qwen3", text | {"use_sliding_window": False, "layer_types": None}, llama.read)


def qwen3_vl_moe(raw: Raw) -> Fields:
    """The mixture of Qwen3-VL. The weights of the chosen experts always sum up to 1."""
    text = _with(raw, num_key_value_heads=16, rope_theta=500000.0, num_experts_per_tok=4, moe_intermediate_size=1408)
    text |= {"num_experts": size(text, "num_experts", size(text, "num_local_experts", 60)), "norm_topk_prob": True}
    return _as("qwen3_moe", text | {"use_sliding_window": False}, mixtures.qwen3_moe)


def _wrap_family(family: Family, fields: Callable[[Raw], Fields], left_out: dict[str, str], **more: Any) -> Family:
    """A family of text models inside of others."""
    names = {
        ours: tuple(PREFIX + name.removeprefix(family.prefix) if name.startswith(family.prefix) else name for name in theirs)
        for ours, theirs in (family.weights or {}).items()
    }
    return replace(family, fields=fields, write=None, weights=names, prefix=PREFIX, left_out=left_out, **more)


OLDER = {"language_model.model.": "language_model."}
"""For files with a whole text model inside: the prefix of its tensors, and what stands before its head's name."""
EXPERTS = llama.fused_experts(PREFIX)
"""All experts in one tensor, as they are published; quantised files have one for each."""
TURNED: dict[str, Any] = {"transposed_weights": re.compile(r"\.experts\.\w+\.weight$"), "transposed_by_shape": True}
LLAMA, MIXTURE = llama.FAMILIES["llama"], mixtures.FAMILIES["qwen3_moe"]
FAMILIES = {
    "gemma3": _wrap_family(gemma.FAMILIES["gemma3_text"], gemma3, LEFT_OUT, older=OLDER),
    "mistral3": _wrap_family(LLAMA, mistral3, LEFT_OUT, older=OLDER, head_if_there=True),
    "qwen2_vl": _wrap_family(LLAMA, qwen2_vl, VISUAL),
    "qwen2_5_vl": _wrap_family(LLAMA, qwen2_vl, VISUAL),
    "qwen3_vl": _wrap_family(LLAMA, qwen3_vl, VISUAL),
    "qwen3_vl_moe": _wrap_family(MIXTURE, qwen3_vl_moe, VISUAL, fused_tensors=EXPERTS, **TURNED),
}
