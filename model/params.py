"""Sampling parameters and stop rules of a request. The one validator of both transports: types and ranges, by field."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from attend.model.errors import InvalidRequest

MAX_CHOICES = 8
MAX_CHOICES_TIMES_PROMPTS = 128
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 300
MAX_BIASES = 300
MAX_BAD_WORDS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY, DEFAULT_PRIORITY = 9, 5
MAX_PROMPT_SCORES = 1 << 20
"""Log probabilities of prompts in one call: some 60 MB of JSON."""
MAX_TEMPERATURE, MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_BIAS = 2, 2, 2, 100
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
SEED_LOW, SEED_HIGH = -(2**63), MAX_INT64
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
_SHOWN = 64
_AT_ONCE = 4096
"""Values that are looked at in one call, which no other thread can interrupt: some 0.1 ms."""


def shorten(text: str, most: int) -> str:
    """A text without its middle where it is longer than that."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(value: Any) -> str:
    """A value as an error message shows it: its type, and no more than 64 characters of it."""
    if value is None:
        return "null"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else _text(value)
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return f"{shown!r} (string)" if isinstance(value, str) else f"{shown} ({_NAMES.get(type(value), type(value).__name__)})"


def _text(value: Any) -> str:
    try:
        return str(value[:_SHOWN] if isinstance(value, list) else value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "too many digits to show"


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` if it is an integer from `low` to `high`; a boolean or 3.0 is not one."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}; got {describe(value)}", name)
    return value


def bounded_number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """`value` as a float if it is a finite number from `low` (or above it) to `high`."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # NaN is in no range
    if not fits or (above_low and value == low):
        start = f"above {low:g} and at most" if above_low else f"from {low:g} to"
        raise InvalidRequest(f"{name} must be a number {start} {high:g}; got {describe(value)}", name)
    return float(value)


def at_most(name: str, values: Collection[Any], limit: int, what: str) -> None:
    """Refuse a collection that is too long."""
    if len(values) > limit:
        raise InvalidRequest(f"{name} may hold at most {limit} {what}; got {len(values)}", name)


def token_ids(name: str, values: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    """`values` if each is a token id of the served model."""
    for start in range(0, len(values), _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        if {*map(type, part)} == {int} and min(part) >= 0 and max(part) < vocab_size:
            continue
        for value in part:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
                known = f"token ids of the vocabulary, integers from 0 to {vocab_size - 1}"
                raise InvalidRequest(f"{name} must hold {known}; got {describe(value)}", name)
    return tuple(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The settings of a request by which a token is drawn from the model's scores."""

    temperature: float = 1.0
    """0 is greedy: the likeliest token, of equals the one with the lowest id."""
    top_k: int = 0
    """Draw among the k likeliest; 0 and -1 mean all."""
    top_p: float = 1.0
    """Draw among the likeliest that together reach this probability; of 0 is left the likeliest, with its equals."""
    min_p: float = 0.0
    """Draw among those at least this likely relative to the likeliest."""
    seed: int | None = None
    """Same seed, same draws; None lets the service choose one and report it."""

    def __post_init__(self) -> None:
        bounded_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        integer("top_k", self.top_k, -1, MAX_INT64)
        bounded_number("top_p", self.top_p, 0, 1)
        bounded_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            integer("seed", self.seed, SEED_LOW, SEED_HIGH)

    @property
    def limits(self) -> bool:
        """True if a token is drawn among some only, which depends on the scores of the others."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingParams:
    """How the model's scores are changed before a token is drawn: allowed, bias, repetition, frequency, presence, in turn."""

    presence_penalty: float = 0.0
    """Taken from the score of every token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Taken from it once for each time that it holds it."""
    repetition_penalty: float = 1.0
    """Divides the positive, and multiplies the negative, scores of tokens of the prompt and the answer (Keskar et al. 2019)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the scores of these tokens."""
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens never follow each other in the answer."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be drawn; empty means all."""
    derived_values: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `model/sampling.py` has worked out of them, once for all answers and steps."""

    def __post_init__(self) -> None:
        bounded_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        bounded_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        bounded_number("repetition_penalty", self.repetition_penalty, 0, MAX_REPETITION_PENALTY, above_low=True)
        at_most("logit_bias", self.logit_bias, MAX_BIASES, "entries")
        for token, bias in self.logit_bias.items():
            bounded_number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
        at_most("bad_words", self.bad_words, MAX_BAD_WORDS, "strings")
        for text in self.bad_words:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                limits = f"strings of 1 to {MAX_STOP_CHARACTERS} characters"
                raise InvalidRequest(f"bad_words must hold {limits}; got {describe(text)}", "bad_words")

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: the parameters alone. (Python before 3.11.4 replaces `__getstate__` of a class with slots.)"""
        return partial(DecodingParams, **{each.name: getattr(self, each.name) for each in fields(self) if each.init}), ()

    @property
    def penalizes(self) -> bool:
        """True if the tokens of the text so far change the scores."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)


NO_CHANGE = DecodingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """The limits and texts that end an answer."""

    max_tokens: int | None = 16
    """None takes what the context has left; 0 computes the prompt alone, for its log probabilities or its echo."""
    min_tokens: int = 0
    """No stop token is drawn, and no stop string obeyed, before so many tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the stop token's text, in the answer."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        most = MAX_INT32 if self.max_tokens is None else integer("max_tokens", self.max_tokens, 0, MAX_INT32)
        integer("min_tokens", self.min_tokens, 0, most)
        at_most("stop", self.stop, MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"stop must hold strings of 1 to {MAX_STOP_CHARACTERS} characters; got {describe(text)}", "stop"
                )
        at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS, "ids")
