"""What becomes of a field that a body has and its route does not know. Names and values decide, in this order:

1. null is absent, whatever the name.
2. A field of OpenAI's or Anthropic's API that asks for nothing of us (`PUBLISHED`) is ignored.
3. A field whose use would change the answer, and which is not carried out (`OFF` of a body, and `SAMPLING`, which other servers
   have), is ignored at a value that does nothing. Else it is an error that names what to use.
4. A name that resembles a known one is an error that names that one.
5. Any other is ignored.

What is ignored is said in the answer: see `Remarks`. With the setting `strict_fields`, 2 and 5 are errors too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attend.model.errors import NotSupported
from attend.model.params import describe
from attend.service.remarks import MAX_IGNORED, Remarks

MAX_UNKNOWN = MAX_IGNORED
"""Unknown fields of one call that are named."""
NEAR = ((10, 2), (6, 1))
"""Letters of an unknown name, and the edits that it may be away from the known one that was meant."""
MAX_NAME = 64
"""Characters of a name that is compared."""


@dataclass(frozen=True, slots=True)
class Off:
    """A field that is not carried out."""

    values: tuple[Any, ...] | None
    """Those that ask for nothing; None: all do, since the field only changes how another one works that must be off."""
    instead: str = ""
    """What to do in place of the field, for the message."""
    up_to_context: bool = False
    """True if numbers up to the model's context ask for nothing too."""


def _use(name: str, *values: Any) -> Off:
    return Off(values, f"use {name}")


_NOTHING = Off(None)
PUBLISHED = frozenset(
    (
        *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "store", "verbosity", "prediction", "moderation", "include", "max_tool_calls", "context_management"),
        *("betas", "container", "mcp_servers", "inference_geo", "cache_control", "speed", "diagnostics", "output_config"),
    )
)
"""Of the published APIs, at any value: hints to their own service, and what is done there beside the answer."""

SAMPLING: dict[str, Off] = {
    "repeat_penalty": _use("repetition_penalty", 1),
    "repeat_last_n": _NOTHING,
    "penalty_last_n": _NOTHING,
    "typical_p": Off((1,)),
    "typ_p": Off((1,)),
    "top_a": Off((0,)),
    "tfs": Off((1,)),
    "tfs_z": Off((1,)),
    "epsilon_cutoff": Off((0,)),
    "eta_cutoff": Off((0,)),
    "penalty_alpha": Off((0,)),
    "top_n_sigma": Off((0, -1)),
    "nsigma": Off((0, -1)),
    "smoothing_factor": Off((0,)),
    "smoothing_curve": _NOTHING,
    "mirostat": Off((0,)),
    "mirostat_mode": Off((0,)),
    "mirostat_tau": _NOTHING,
    "mirostat_eta": _NOTHING,
    "dry_multiplier": Off((0,)),
    "dry_base": _NOTHING,
    "dry_allowed_length": _NOTHING,
    "dry_penalty_last_n": _NOTHING,
    "dry_sequence_breakers": _NOTHING,
    "xtc_probability": Off((0,)),
    "xtc_threshold": _NOTHING,
    "dynatemp_range": Off((0,)),
    "dynatemp_exponent": _NOTHING,
    "no_repeat_ngram_size": Off((0,), "use frequency_penalty"),
    "do_sample": Off((True,), "use temperature: 0 is greedy"),
    "num_beams": Off((1,), "use n"),
    "beam_width": Off((1,), "use n"),
    "use_beam_search": Off((False,), "use n"),
    "length_penalty": Off((1,)),
    "early_stopping": Off((False,)),
    "num_ctx": Off((0,), "the server's max_model_len is the context", up_to_context=True),
    "num_predict": _use("max_tokens", -1),
    "n_predict": _use("max_tokens", -1),
    "max_new_tokens": _use("max_tokens"),
    "max_length": _use("max_tokens"),
    "min_length": _use("min_tokens", 0),
    "min_new_tokens": _use("min_tokens", 0),
    "stop_sequences": _use("stop", []),
    "n_probs": _use("logprobs", 0),
    "ban_eos_token": _use("ignore_eos", False),
    "custom_token_bans": _use("logit_bias", "", []),
    "samplers": Off(([],)),
    "sampler_order": Off(([],)),
    "sampler_priority": Off(([],)),
    "options": Off(({},), "give each option as a field of its own"),
    "guided_json": _use("structured_outputs.json"),
    "guided_regex": _use("structured_outputs.regex"),
    "guided_choice": _use("structured_outputs.choice"),
    "guided_grammar": _use("structured_outputs.grammar"),
    "guided_json_object": _use("structured_outputs.json_object", False),
    "json_schema": _use("response_format", {}),
    "regex": _use("structured_outputs.regex", ""),
    "stop_regex": _use("stop", "", []),
    "ebnf": _use("structured_outputs.grammar", ""),
    "grammar": _use("structured_outputs.grammar", ""),
    "format": _use("response_format", ""),
    "think": _use("reasoning_effort"),
    "enable_thinking": _use("chat_template_kwargs"),
    "thinking": _use("reasoning_effort", {"type": "auto"}),
    "reasoning": _use("reasoning_effort", {}),
    "chat_template": Off(("",), "the server's is used: --chat-template"),
    "documents": Off(([],), "write them into a message"),
    "lora_path": _use("model"),
}
"""Fields of other servers: what does nothing there, and the field of ours that does the same."""


def known_fields(
    document: dict[str, Any], known_names: frozenset[str], off: dict[str, Off], remarks: Remarks
) -> dict[str, Any]:
    """The fields of a body that its route knows, and the first other one that is an error in itself.

    The rest is ignored, or raises NotSupported by name.
    """
    kept = {}
    for name, value in document.items():
        if name in known_names:
            kept[name] = value
        elif value is not None:
            rule = off.get(name)
            if rule is not None:
                _check_off(name, value, rule, remarks.max_model_len)
                remarks.ignore(name)
            elif not is_ignored(name, known_names, remarks):
                return kept | {name: value}
    return kept


def is_ignored(name: str, known_names: frozenset[str], remarks: Remarks) -> bool:
    """True if a field that is not known is ignored, and said; else it is an error."""
    if name in remarks.ignored_fields:
        return True
    if remarks.strict or len(remarks.ignored_fields) >= MAX_UNKNOWN:
        return False
    if name not in PUBLISHED and (meant := nearest(name, known_names)) is not None:
        remarks.near[name] = meant
        return False
    remarks.ignore(name)
    return True


def _check_off(name: str, value: Any, rule: Off, max_model_len: int) -> None:
    if rule.values is None or any(kind_of(value) is kind_of(off) and value == off for off in rule.values):
        return
    if rule.up_to_context and type(value) is int and 0 < value <= max_model_len:
        return
    instead = f": {rule.instead}" if rule.instead else ""
    raise NotSupported(f"{name} is not supported{instead}; got {describe(value)}", name)


def nearest(name: str, known_names: Iterable[str]) -> str | None:
    """The known name that a mistyped one resembles; None for none."""
    edits = next((edits for letters, edits in NEAR if len(name) >= letters), 0)
    if not edits or len(name) > MAX_NAME:
        return None
    return next((other for other in sorted(known_names) if _edits_within(name, other, edits)), None)


def _edits_within(one: str, other: str, most: int) -> bool:
    """True if one text becomes the other by so many letters added, left out or replaced."""
    if abs(len(one) - len(other)) > most or len({*one} ^ {*other}) > 2 * most:  # an edit takes a letter and brings one
        return False
    row = list(range(len(other) + 1))
    for count, letter in enumerate(one, start=1):
        last, row[0] = row[0], count
        for place, wanted in enumerate(other, start=1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (letter != wanted))
        if min(row) > most:
            return False
    return row[-1] <= most


def kind_of(value: Any) -> type:
    """1 and 1.0 are one kind: a number. true is not."""
    return float if type(value) is int else type(value)
