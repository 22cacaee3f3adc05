"""How config.json says by how much queries and keys are rotated: `rope_scaling`, `rope_parameters`, and keys beside them."""

import logging
import math
from functools import cache
from typing import Any

from attend.model.errors import CheckpointError
from attend.model.net.families.family import Fields, Raw, decoder_sizes, head_size, need, number, positions, refuse, size
from attend.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)

ORIGINAL = "original_max_position_embeddings"
KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", ORIGINAL),
        *("attn_factor", "extrapolation_factor"),
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", ORIGINAL),
}
"""What each `rope_type` may say beside its theta."""
log = logging.getLogger("attend.model")


def decoder(
    raw: Raw, *, eps: float = 1e-6, tied_head: bool = False, theta: float = 10000.0, partial: float | None = None
) -> Fields:
    """The fields of ModelConfig whose keys are the same in most families, with those on rotation."""
    return decoder_sizes(raw, eps=eps, tied_head=tied_head) | rope(raw, head_size(raw), theta=theta, partial=partial)


def rope_type(values: Any) -> Any:
    """The kind of a RoPE; None where its object is none."""
    return values.get("rope_type", values.get("type", "default")) if isinstance(values, dict) else None


def rope(raw: Raw, head_size: int, *, theta: float = 10000.0, partial: float | None = None) -> Fields:
    """The fields of ModelConfig on rotation, as `transformers` reads them.

    From `rope_scaling`, or else from `rope_parameters`, never from both. Keys beside the object hold where it has none.
    `partial` is the share of a head's columns that is rotated where no key says one; None: no key may say one.
    """
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(name) or {}
    if not isinstance(values, dict):
        raise CheckpointError(f"config.json: {name} must be an object; got {values!r}")
    values = {"rope_theta": number(raw, "rope_theta", theta), **values}
    if partial is None:
        refuse(raw, "partial_rotary_factor", None, 1.0)
        refuse(values, "partial_rotary_factor", None, 1.0)
    elif values.get("partial_rotary_factor") is None:
        values["partial_rotary_factor"] = number(raw, "partial_rotary_factor", partial)
    return rope_of(raw, name, values, head_size)


def rope_of(raw: Raw, name: str, values: dict[str, Any], head_size: int) -> Fields:
    """Fields of a RoPE from one object of config.json, which is called `name` there.

    Keys from which `transformers` computes nothing are passed over: a line of the log says so.
    """
    kind = rope_type(values)
    if kind not in KEYS:
        raise CheckpointError(f"config.json: {name}: rope_type {kind!r} is not supported; known: {', '.join(KEYS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *KEYS[kind]}
    if values.get("attention_factor") is not None:
        known -= {"attn_factor"}
    unknown = {str(key): value for key, value in values.items() if key not in known and value is not None}
    if objects := sorted(key for key, value in unknown.items() if isinstance(value, dict)):
        raise CheckpointError(
            f"config.json: {name} has {', '.join(objects)}: RoPE parameters for each layer type are not supported"
        )
    if unknown:
        tell(f"config.json: {name} has {', '.join(sorted(unknown))}, which rope_type {kind!r} does not use: ignored")
    share = number(values, "partial_rotary_factor", 1.0)
    rotated = head_size if kind == "proportional" else int(head_size * share)
    fields: dict[str, Any] = {"rope_theta": number(values, "rope_theta", 10000.0)}
    fields["rope_size"] = None if rotated == head_size else rotated
    fields["rope_scaling"] = scaling = _scaling(raw, kind, values)
    if isinstance(scaling, (DynamicScaling, YarnScaling)):  # what it learned, and how far it is stretched
        learned, stretched = positions(raw), int(scaling.factor * scaling.original_positions)
        fields["max_positions"] = max(learned, stretched)
        fields["default_positions"] = learned if stretched > learned else None
    return fields


def _scaling(raw: Raw, kind: str, values: dict[str, Any]) -> RopeScaling | None:
    def need_number(key: str) -> float:
        return number({key: need(values, key)}, key, 1.0)

    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(need_number("factor"))
    if kind == "dynamic":
        return DynamicScaling(need_number("factor"), positions(raw))
    if kind == "proportional":
        return ProportionalScaling(number(values, "factor", 1.0), number(values, "partial_rotary_factor", 1.0))
    original = original_positions(raw, values)
    if kind == "llama3":
        return Llama3Scaling(need_number("factor"), need_number("low_freq_factor"), need_number("high_freq_factor"), original)
    factor = number(values, "factor", positions(raw) / original)
    if kind == "longrope":
        learned = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        lists = (_numbers(values, "short_factor"), _numbers(values, "long_factor"))
        return LongScaling(*lists, original, number(values, "attention_factor", learned))
    if "factor" not in values:  # null means what follows from the positions, and absent is an error of `transformers` too
        need(values, "factor")
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"config.json: truncate must be true or false; got {truncate!r}")
    fast, slow = number(values, "beta_fast", 32.0) or 32.0, number(values, "beta_slow", 1.0) or 1.0
    return YarnScaling(factor, original, fast, slow, _attention_factor(values, factor), truncate)


def original_positions(raw: Raw, values: dict[str, Any]) -> int:
    """The positions that the model learned: those beside the object, else those in it, else all positions."""
    places = (place for place in (raw, values) if place.get(ORIGINAL) is not None)
    value = next(places, {ORIGINAL: positions(raw)})[ORIGINAL]
    return size({ORIGINAL: int(value) if isinstance(value, float) and value.is_integer() else value}, ORIGINAL)


def _attention_factor(values: dict[str, Any], factor: float) -> float:
    """What YaRN multiplies rotated queries and keys by. `attn_factor` comes on top of what follows from `factor`, as for
    llama.cpp and vLLM; `transformers` does not look at it, and we do not beside an `attention_factor`.
    """
    refuse(values, "extrapolation_factor", None, 1.0)
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", 1.0)
    scales = (number(values, "mscale", 0.0), number(values, "mscale_all_dim", 0.0))
    learned = yarn_scale(factor, scales[0]) / yarn_scale(factor, scales[1]) if all(scales) else yarn_scale(factor, 1.0)
    return learned * number(values, "attn_factor", 1.0)


@cache
def tell(text: str) -> None:
    """Log it once in a process: a config is read several times."""
    log.info(text)


def yarn_scale(factor: float, weight: float) -> float:
    """What YaRN multiplies one side of a product of queries and keys by; `weight` is its `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _numbers(values: dict[str, Any], key: str) -> tuple[float, ...]:
    given = need(values, key)
    if not isinstance(given, list):
        raise CheckpointError(f"config.json: {key} must be a list of numbers; got {given!r}")
    return tuple(number({key: value}, key, 1.0) if value is not None else 0.0 for value in given)


def two_ropes(raw: Raw, head_size: int, *, theta: float, local_key: str, local_theta: float) -> Fields:
    """The same for a family whose layers with a window turn otherwise: `rope_parameters` has an object for each kind of layer.

    Older configs have one theta for each kind, and a `rope_scaling` for layers without a window.
    """
    values = raw.get("rope_parameters") or {}
    if not isinstance(values, dict) or values.keys() - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"config.json: rope_parameters must have full_attention and sliding_attention; got {values!r}")
    whole = {**(values.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = dict(values.get("sliding_attention") or {})
    whole.setdefault("rope_theta", number(raw, "rope_theta", theta))
    local.setdefault("rope_theta", number(raw, local_key, local_theta))
    for object_ in (whole, local):
        refuse(object_, "partial_rotary_factor", None, 1.0)
    return by_window(*(rope_of_kind(raw, object_, head_size) for object_ in (whole, local)))


def rope_of_kind(raw: Raw, values: dict[str, Any], head_size: int) -> Fields:
    """The RoPE of one kind of layers, from an object of its own: keys beside that do not hold."""
    if rope_type(values) == "default":
        values = {key: value for key, value in values.items() if key != "partial_rotary_factor"}  # all columns turn
    elif rope_type(values) != "proportional":
        refuse(values, "partial_rotary_factor", None, 1.0)
    return rope_of({key: value for key, value in raw.items() if key != ORIGINAL}, "rope_parameters", values, head_size)


def by_window(fields: Fields, slides: Fields) -> Fields:
    """The fields of ModelConfig from those of layers without a window, and of layers with one."""
    if slides["rope_scaling"] not in (None, fields["rope_scaling"]):
        raise CheckpointError("config.json: RoPE scaling of sliding-window layers must be that of the other layers")
    alike = slides["rope_scaling"] == fields["rope_scaling"] and slides["rope_theta"] == fields["rope_theta"]
    if slides["rope_scaling"] is not None and not alike:
        raise CheckpointError(
            "config.json: RoPE scaling of sliding-window layers with a rope_theta of their own is not supported"
        )
    return fields if alike else fields | {"local_rope_theta": slides["rope_theta"]}
