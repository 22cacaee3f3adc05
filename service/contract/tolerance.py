"""What becomes of a field that a body has and its route does not know. Names and values decide, in this order:

1. null is absent, whatever the name.
2. A field of OpenAI's or Anthropic's API that asks for nothing of us (`PUBLISHED`) is ignored.
3. A field that would change the answer and is not carried out (`unsupported` of a body) is ignored at a value that does
   nothing. Else it is an error that names what to use.
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

NEAR = ((10, 2), (6, 1))
"""Letters of an unknown name, and the edits that it may be away from the known one that was meant."""
MAX_NAME = 64
"""Characters of a name that is compared."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that is not carried out."""

    values: tuple[Any, ...] | None
    """Those that ask for nothing; None: all do, since the field only changes how another one works that must be off."""
    instead: str = ""
    """What to do in place of the field, for the message."""

    def check(self, name: str, value: Any) -> None:
        """Raise NotSupported for a value that asks for something."""
        if self.values is not None and not any(_kind(value) is _kind(off) and value == off for off in self.values):
            instead = self.instead and f": {self.instead}"
            raise NotSupported(f"{name} is not supported{instead}; got {describe(value)}", name)


def use_instead(**instead: str) -> dict[str, Unsupported]:
    """Fields that no value switches off, and what to do in place of each."""
    return {name: Unsupported((), text) for name, text in instead.items()}


def _use(name: str, *values: Any) -> Unsupported:
    return Unsupported(values, f"use {name}")


PUBLISHED = frozenset(
    (
        *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "store", "verbosity", "prediction", "moderation", "include", "max_tool_calls", "context_management"),
        *("betas", "container", "mcp_servers", "inference_geo", "cache_control", "speed", "diagnostics", "output_config"),
    )
)
"""Of the published APIs, at any value: hints to their own service, and what is done there beside the answer."""
_AT_ANY = (
    *("repeat_last_n", "penalty_last_n", "smoothing_curve", "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "num_ctx"),
)
_AT_0 = (
    *("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "smoothing_factor", "mirostat", "mirostat_mode"),
    *("dry_multiplier", "xtc_probability", "dynatemp_range"),
)
SAMPLING: dict[str, Unsupported] = {
    **dict.fromkeys(_AT_ANY, Unsupported(None)),
    **dict.fromkeys(_AT_0, Unsupported((0,))),
    **dict.fromkeys(("typical_p", "typ_p", "tfs", "tfs_z", "length_penalty"), Unsupported((1,))),
    **dict.fromkeys(("top_n_sigma", "nsigma"), Unsupported((0, -1))),
    **dict.fromkeys(("samplers", "sampler_order", "sampler_priority"), Unsupported(([],))),
    **dict.fromkeys(("num_predict", "n_predict"), _use("max_tokens", -1)),
    **dict.fromkeys(("max_new_tokens", "max_length"), _use("max_tokens")),
    **dict.fromkeys(("min_length", "min_new_tokens"), _use("min_tokens", 0)),
    **dict.fromkeys(("num_beams", "beam_width"), _use("n", 1)),
    **dict.fromkeys(("guided_regex", "regex"), _use("structured_outputs.regex", "")),
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), _use("structured_outputs.grammar", "")),
    **dict.fromkeys(("json_schema", "format"), _use("response_format", {}, "")),
    "early_stopping": Unsupported((False,)),
    "repeat_penalty": _use("repetition_penalty", 1),
    "no_repeat_ngram_size": _use("frequency_penalty", 0),
    "do_sample": Unsupported((True,), "use temperature: 0 is greedy"),
    "use_beam_search": _use("n", False),
    "stop_sequences": _use("stop", []),
    "n_probs": _use("logprobs", 0),
    "ban_eos_token": _use("ignore_eos", False),
    "custom_token_bans": _use("logit_bias", "", []),
    "options": Unsupported(({},), "give each option as a field of its own"),
    "guided_json": _use("structured_outputs.json"),
    "guided_choice": _use("structured_outputs.choice"),
    "guided_json_object": _use("structured_outputs.json_object", False),
    "stop_regex": _use("stop", "", []),
    "think": _use("reasoning_effort"),
    "enable_thinking": _use("chat_template_kwargs"),
    "thinking": _use("reasoning_effort", {"type": "auto"}),
    "reasoning": _use("reasoning_effort", {}),
    "chat_template": Unsupported(("",), "the server's is used: --chat-template"),
    "documents": Unsupported(([],), "write them into a message"),
    "lora_path": _use("model"),
}
"""Fields of other servers: what does nothing there, and the field of ours that does the same."""


def known_fields(data: Any, names: frozenset[str], unsupported: dict[str, Unsupported], remarks: Any) -> Any:
    """An object's fields that are known and not null, and the first other one that is an error in itself. The rest is ignored,
    and said in `remarks`, or raises NotSupported by name.
    """
    if not isinstance(data, dict) or (names.issuperset(data) and None not in data.values()):
        return data
    kept = {name: value for name, value in data.items() if value is not None and name in names}
    for name, value in data.items():
        if value is None or name in names:
            continue
        if name in unsupported:
            unsupported[name].check(name, value)
            remarks.ignore(name)
        elif not _is_ignored(name, names, remarks):
            return kept | {name: value}
    return kept


def _is_ignored(name: str, known_names: Iterable[str], remarks: Remarks) -> bool:
    """True if a field that is not known is ignored, and said; else it is an error."""
    if name in remarks.ignored_fields:
        return True
    if remarks.strict or len(remarks.ignored_fields) >= MAX_IGNORED:
        return False
    if name not in PUBLISHED and (meant := _nearest(name, known_names)) is not None:
        remarks.near[name] = meant
        return False
    remarks.ignore(name)
    return True


def _nearest(name: str, known_names: Iterable[str]) -> str | None:
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


def _kind(value: Any) -> type:
    """1 and 1.0 are one kind: a number. true is not."""
    return float if type(value) is int else type(value)
