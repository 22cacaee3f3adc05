"""How tokens are drawn, as plain records. No torch: the scheduler makes them, and they can be sent to another process.

A `SamplingPlan` says what holds for all tokens of a request, a `Draw` what holds for the next one.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams

if TYPE_CHECKING:  # a scheduler needs no numpy
    import numpy as np
    from numpy.typing import NDArray

MASK_64 = (1 << 64) - 1
LEAST_TEMPERATURE = 2.0**-126
"""The smallest normal float32: what is above 0 and below it divides as it does."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How a request draws its tokens, worked out once. Scheduler, runner and kernels ask here, and nowhere else."""

    params: SamplingParams
    seed: int
    answer_index: int = 0
    """Which of the call's answers."""
    decoding: DecodingParams = NO_CHANGE
    logprobs: int | None = None
    """Alternatives to report with each token; None reports nothing."""
    has_bad_words: bool = False
    has_grammar: bool = False
    scored_token_ids: tuple[int, ...] = ()
    """Tokens to report beside the alternatives, whatever they are; only with `logprobs`."""
    banned_tokens: tuple[int, ...] = ()
    """Token ids that it never draws."""

    is_greedy: bool = field(init=False, compare=False)
    """The best score is the token: no noise, no limits. A CUDA graph draws it together with its step."""
    is_limited: bool = field(init=False, compare=False)
    """Drawn among some tokens only (top-k, top-p, min-p)."""
    changes_scores: bool = field(init=False, compare=False)
    """Scores are changed first, whatever the tokens so far."""
    penalizes: bool = field(init=False, compare=False)
    """Scores are changed by the tokens so far."""
    draws_from_scores: bool = field(init=False, compare=False)
    """Tokens depend on scores, seed and position alone, and nobody asks for their scores. Then they can be drawn before the
    tokens before them are known on the host: in a step that is submitted early, or after a draft.
    """
    can_sample_unmasked: bool = field(init=False, compare=False)
    """A token may be drawn without the grammar's mask and checked afterwards: one that passes is what the mask gives.

    So it is for greedy and drawn tokens, since each token's noise is its own, but not where the scores of other tokens decide
    which are kept.
    """
    key: int = field(init=False, compare=False)
    """64 mixed bits of seed and answer."""

    def __post_init__(self) -> None:
        limited, changes = self.params.limits, self.decoding is not NO_CHANGE
        plain = not (changes or self.has_bad_words or self.has_grammar)
        derived = {
            "is_greedy": self.params.temperature <= 0,
            "is_limited": limited,
            "changes_scores": changes,
            "penalizes": self.decoding.penalizes,
            "draws_from_scores": plain and self.logprobs is None,
            "can_sample_unmasked": not limited,
            "key": answer_key(self.seed, self.answer_index),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


class TextCounts(NamedTuple):
    """How often tokens occur in a text, for the penalties. Arrays of int64."""

    seen_tokens: "array[int]"
    """Ids that stand in the prompt or the output, each once."""
    output_tokens: "array[int]"
    """Ids that stand in the output, each once."""
    counts: "array[int]"
    """The number of occurrences of each token, in the same order."""


class History:
    """Keeps up the `TextCounts` of a request as its output grows, so that a step does not read a long text again."""

    def __init__(self) -> None:
        self._text = TextCounts(array("q"), array("q"), array("q"))
        self._known: set[int] = set()
        self._places: dict[int, int] = {}
        self._num_read = (0, 0)

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> TextCounts:
        """Take in what has come since the last call, of the same two sequences."""
        text, new = self._text, output[self._num_read[1] :]
        unseen = [token for token in dict.fromkeys([*prompt[self._num_read[0] :], *new]) if token not in self._known]
        self._num_read = len(prompt), len(output)
        self._known.update(unseen)
        text.seen_tokens.extend(unseen)
        for token in new:
            place = self._places.setdefault(token, len(text.output_tokens))
            if place == len(text.output_tokens):
                text.output_tokens.append(token)
                text.counts.append(0)
            text.counts[place] += 1
        return text


@dataclass(slots=True)  # freezing it would cost each request two microseconds a step
class Draw:
    """The inputs of one row's draw beside its scores."""

    plan: SamplingPlan
    position: int
    """Index of the drawn token in prompt + output."""
    banned_tokens: tuple[int, ...] = ()
    """Token ids that must not be drawn."""
    text: TextCounts | None = None
    """Token counts for the penalties; None: an empty text."""
    mask: "NDArray[np.bool_] | None" = None
    """Tokens that a grammar allows, bool [V]."""
    awaits_mask: bool = False
    """Its grammar mask is computed beside the step, and the token is drawn again with it: until then any token serves."""

    @property
    def key(self) -> int:
        """The 64 bits that its noise is a hash of: mixed of seed, answer index and position."""
        return mix(self.plan.key ^ self.position)

    @property
    def may_exclude(self) -> bool:
        """True if its parameters may leave no token."""
        return bool(self.banned_tokens) or self.plan.changes_scores or self.mask is not None

    @property
    def takes_the_best(self) -> bool:
        """True if its token is the best of the model's own scores."""
        return self.plan.is_greedy and not self.may_exclude


def completing(bad_words: Sequence[Sequence[int]], tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens that would complete one of `bad_words` after `tokens`."""
    return tuple(
        word[-1]
        for word in bad_words
        if len(word) == 1 or (tokens and tokens[-1] == word[-2] and [*tokens[1 - len(word) :]] == [*word[:-1]])
    )


def answer_key(seed: int, answer_index: int) -> int:
    """64 mixed bits of (seed, answer index)."""
    return mix(mix(seed & MASK_64) ^ answer_index)


def reach(min_p: float) -> float:
    """How far below the best a score over the temperature may be under min_p; infinite without it."""
    return abs(math.log(min_p)) if min_p else math.inf


def mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014): every input bit moves every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK_64
    return value ^ value >> 31
