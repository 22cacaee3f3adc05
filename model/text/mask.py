"""The state of an answer in its grammar, and the mask of tokens that may come next.

Matchers are llguidance's; a mask is a row of booleans over the vocabulary.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import llguidance

from attend.model.errors import EngineFailed
from attend.model.machine import usable_cores
from attend.model.params import shorten

if TYPE_CHECKING:  # numpy takes longer to import than the child process of model/text/grammar.py takes for its work
    import numpy as np
    from numpy.typing import NDArray

SHOWN = 300
"""Characters of the library's explanation that a message repeats."""
MAX_RENEW_SECONDS = 0.05
"""Seconds of processor time: a grammar that takes longer to compile is not compiled again in a step of the engine."""
MAX_REPLAY_SECONDS = 0.1
"""Of processor time, in which an answer's tokens are taken again: 1 us each, far more only where a grammar is ambiguous."""
REPLAYED_AT_ONCE = 256
NO_TEXT = "no text matches it"
MIN_USES = 256
"""New states that last for fewer masks and tokens are of no help. A schema of long strings needs ten states a mask."""
FAULT = "structured output: "
"""How the reason begins for which an answer cannot follow its grammar any further. That is its caller's, as the grammar is."""
DEAD_END = f"{FAULT}the schema or grammar reached a dead end: no token can continue the answer"
TOO_COMPLEX = f"{FAULT}the grammar is too complex to be followed any further"


MAX_DIGITS = 20
"""In a row in JSON of ours, in a number: a small model may write zeros without end."""
_IN_TEXT = '"x-:/_+'
"""Any of these may follow digits in text, and none of them follows the digits of a number."""
_DIGITS = re.compile("[0-9]*")


class GrammarFailed(EngineFailed):
    """The matcher of one request cannot go on; the other requests are not touched."""


class Grammar(Protocol):
    """The state of one answer in its grammar. Not thread-safe: it belongs to one request."""

    @property
    def is_finished(self) -> bool:
        """True if nothing but an end token can follow."""

    def mask(self) -> "NDArray[np.bool_]":
        """Which of the `vocab_size` tokens may come next; an end token exactly when the text so far is complete."""

    def allows(self, token_id: int) -> bool:
        """True if the text may go on with a token, in a fraction of a mask's time.

        Where only one text can follow, the mask holds that text's longest token alone, and this any of its beginnings.
        """

    def advance(self, token_id: int) -> None:
        """Take a token that the mask allows. Replaying a request's output on a fresh `start()` gives the same state."""

    def copy(self) -> "Grammar":
        """An independent one at the same place."""


class DigitRuns:
    """The digits that tokens begin and end with, by which a number of more than MAX_DIGITS in a row is ended."""

    def __init__(self, words: Mapping[str, int], vocab_size: int) -> None:
        import numpy as np

        self.leading: NDArray[np.int32] = np.zeros(vocab_size, dtype=np.int32)
        self._trailing: dict[int, tuple[int, bool]] = {}
        for word, token in words.items():
            if token < vocab_size and '"' in words and not word.isalpha():
                leading, trailing = len(_digits_of(word)), len(_digits_of(word[::-1]))
                self.leading[token] = leading
                if trailing:
                    self._trailing[token] = (trailing, leading == len(word))
        self.in_text = [words[letter] for letter in _IN_TEXT if words.get(letter, vocab_size) < vocab_size]

    def run_after(self, run: int, token_id: int) -> int:
        """How many digits a text ends with after a token; it ended with `run` before."""
        trailing, is_whole = self._trailing.get(token_id, (0, False))
        return run + trailing if is_whole else trailing

    def fits(self, run: int, token_id: int) -> bool:
        """True if a token adds no digits to `run`, or few enough."""
        return not 0 <= token_id < len(self.leading) or run + int(self.leading[token_id]) <= MAX_DIGITS

    def without_long(self, mask: "NDArray[np.bool_]", run: int) -> "NDArray[np.bool_]":
        """The mask after `run` digits, without tokens that make them too many, where they are a number that can end."""
        if any(mask[token] for token in self.in_text):
            return mask
        kept: NDArray[np.bool_] = mask & (self.leading <= MAX_DIGITS - run)
        return kept if kept.any() else mask


def _digits_of(word: str) -> str:
    found = _DIGITS.match(word)
    return "" if found is None else found[0]


class Matcher:
    """`Grammar` over llguidance. Its first error is its last: every later call raises it again.

    Copies share the states of their lexer, and the library counts them against one limit. Where they are used up, by this
    answer or by others, the matcher takes its tokens again on states of its grammar that are new.
    """

    def __init__(self, grammar: "CompiledGrammar", states: "States", matcher: llguidance.LLMatcher, tokens: list[int]) -> None:
        self._grammar = grammar
        self._states = states
        self._matcher = matcher
        self._taken = tokens
        self._ready: NDArray[np.bool_] | None = None
        """The tokens that fit here, where `compute_masks` has found them."""
        self._failed = ""
        """Why there were no new states."""
        self._run = 0
        """Digits at the end of the text."""

    @property
    def is_finished(self) -> bool:
        """See `Grammar.is_finished`."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> "NDArray[np.bool_]":
        """See `Grammar.mask`. GrammarFailed if no token fits: a limit was hit, or the grammar has a dead end here."""
        shape = self._grammar.shape
        self._states.uses += 1
        allowed = unpack_bits(self._matcher.compute_bitmask(), shape.vocab_size) if self._ready is None else self._ready
        if self._matcher.is_error() and self._renew_states():
            allowed = unpack_bits(self._matcher.compute_bitmask(), shape.vocab_size)
        self._check()
        allowed[shape.size :] = False
        accepting = self._matcher.is_accepting()
        for end in shape.ends:
            allowed[end] = accepting
        if self._run and self._grammar.digits is not None:
            allowed = self._grammar.digits.without_long(allowed, self._run)
        if not allowed.any():
            raise GrammarFailed(DEAD_END)
        return allowed

    def allows(self, token_id: int) -> bool:
        """See `Grammar.allows`. False where a limit was hit: `mask` then says so."""
        if self._failed or self._is_long(token_id):
            return False
        return self._allows(token_id) or (self._renew_states() and self._allows(token_id))

    def advance(self, token_id: int) -> None:
        """See `Grammar.advance`. GrammarFailed if the token does not fit."""
        self._ready = None
        self._states.uses += 1
        if not self._matcher.consume_token(token_id) and self._renew_states():
            self._matcher.consume_token(token_id)
        self._check()
        self._taken.append(token_id)
        if self._grammar.digits is not None:
            self._run = self._grammar.digits.run_after(self._run, token_id)

    def copy(self) -> "Matcher":
        """See `Grammar.copy`."""
        other = Matcher(self._grammar, self._states, self._matcher.deep_copy(), [*self._taken])
        other._failed, other._run = self._failed, self._run
        return other

    def _is_long(self, token_id: int) -> bool:
        """True if a token makes a number too long. The mask tells whether the number can end."""
        digits = self._grammar.digits
        if digits is None or not self._run or digits.fits(self._run, token_id):
            return False
        return all(self._matcher.validate_tokens([token]) == 0 for token in digits.in_text)

    def _allows(self, token_id: int) -> bool:
        if token_id in self._grammar.shape.ends:
            return self._matcher.is_accepting()
        return token_id < self._grammar.shape.size and self._matcher.validate_tokens([token_id]) == 1

    def _renew_states(self) -> bool:
        """True if the states were used up, so that what the library said is void, and the matcher now has others."""
        if self._failed or not self._states.used_up():
            return False
        try:
            self._states = self._grammar.renew_states(self._states)
            self._matcher, self._ready = self._states.start(), None
            limit = time.thread_time() + MAX_REPLAY_SECONDS
            for begin in range(0, len(self._taken), REPLAYED_AT_ONCE):
                self._matcher.consume_tokens(self._taken[begin : begin + REPLAYED_AT_ONCE])
                if time.thread_time() > limit:
                    raise GrammarFailed(TOO_COMPLEX)
        except GrammarFailed as error:
            self._failed = str(error)
        return not self._failed

    def _check(self) -> None:
        if self._failed:
            raise GrammarFailed(self._failed)
        if self._matcher.is_error():
            said = error_line(self._matcher)
            raise GrammarFailed(DEAD_END if said == NO_TEXT else FAULT + said)


def compute_masks(grammars: Iterable[Grammar]) -> None:
    """Work out the masks of several answers side by side, on threads of their own; `mask` then has them at hand.

    Not those that are at hand.
    """
    import numpy as np

    matchers = [each for each in grammars if isinstance(each, Matcher) and each._ready is None and not each._failed]
    matchers = [each for each in matchers if not each._matcher.is_error()]
    if not matchers:
        return
    size = matchers[0]._grammar.shape.vocab_size
    bits = np.zeros((len(matchers), -(-size // 32)), dtype=np.int32)
    places = [(each._matcher, row) for row, each in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(places, bits.ctypes.data, bits.shape[1] * 4, len(matchers))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=size, bitorder="little").view(np.bool_)
    for each, row in zip(matchers, allowed, strict=True):
        each._ready = row


@cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor(usable_cores())


def unpack_bits(bits: bytes, size: int) -> "NDArray[np.bool_]":
    """The first `size` bits, lowest bit of each byte first, as booleans."""
    import numpy as np

    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little").view(np.bool_)


class Shape(NamedTuple):
    """Sizes and end tokens of the vocabulary that grammars are compiled for."""

    ends: tuple[int, ...]
    """The tokens that end an answer."""
    size: int
    """Token ids that the tokenizer knows."""
    vocab_size: int
    """Scores that the model gives."""


@dataclass(slots=True)
class States:
    """The lexer's states that all copies of one matcher share."""

    first: llguidance.LLMatcher
    """Before the first token. It has no mask: a copy would hold it too, whatever became of the states."""
    opening: int | None
    """A token that may come first; None where none is known."""
    uses: int = 0
    """How many masks were computed and tokens accepted with them."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The library refuses to copy what another thread is copying."""

    def start(self) -> llguidance.LLMatcher:
        """A copy of the matcher before the first token."""
        with self.lock:
            return self.first.deep_copy()

    def used_up(self) -> bool:
        """True if there can be no more of them. Any mask fails then, and every token is refused, also one that fits.

        So one token tells, in microseconds: the step thread asks after each refusal.
        """
        return self.opening is not None and self.start().validate_tokens([self.opening]) == 0


class CompiledGrammar:
    """A grammar bound to a vocabulary; any number of answers may follow it at once. `build` compiles it."""

    def __init__(
        self, build: Callable[[], llguidance.LLMatcher], shape: Shape, size_bytes: int, digits: DigitRuns | None = None
    ) -> None:
        """`digits`: numbers in it have at most MAX_DIGITS in a row; None for a grammar of the caller's own."""
        self._build = build
        self.digits = digits
        self._lock = threading.Lock()
        started = time.thread_time()
        first = build()
        self.seconds = time.thread_time() - started
        """Processor time that compiling it takes."""
        self._states = States(first, _opening(first.deep_copy()))
        self.shape = shape
        self.size_bytes = size_bytes
        """About what it holds in memory."""

    def start(self) -> Grammar:
        """A grammar before its first token."""
        states = self._states
        return Matcher(self, states, states.start(), [])

    def refresh(self) -> None:
        """New states where those at hand are used up. Compiles the grammar: never from the step thread."""
        spent = self._states
        if spent.used_up():
            made = States(self._build(), spent.opening)
            with self._lock:
                self._states = made if self._states is spent else self._states

    def renew_states(self, states: States) -> States:
        """Other states than those, which are used up; the first to ask has the grammar compiled again, in the step thread.

        GrammarFailed for a grammar that takes long to compile, or whose states are used up in no time.
        """
        with self._lock:
            current = self._states
            if current is states or current.used_up():  # others may have used up what came after those
                if self.seconds > MAX_RENEW_SECONDS or current.uses < MIN_USES:
                    raise GrammarFailed(TOO_COMPLEX)
                self._states = States(self._build(), states.opening)
            return self._states


def _opening(matcher: llguidance.LLMatcher) -> int | None:
    """The first token that fits before all others."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return (bits & -bits).bit_length() - 1 if bits else None


def error_line(matcher: llguidance.LLMatcher) -> str:
    """The library's explanation as one short line; it says where: line and column of a grammar, character of a regex."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    if text.strip().startswith("NoExtension"):
        return NO_TEXT
    regex = re.search(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: (.*)", text)
    if regex:
        return f"regex, character {len(regex[1]) + 1}: {regex[2]}"
    return shorten(" ".join(text.split()), SHOWN)
