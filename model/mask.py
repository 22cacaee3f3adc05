"""Where an answer stands in its grammar, and which tokens may come next there.

Matchers are llguidance's; a mask is a row of booleans over the vocabulary.
"""

import os
import re
import threading
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Protocol

import llguidance

from model.errors import EngineFailed

if TYPE_CHECKING:  # numpy takes longer to import than the child process of model/grammar.py takes for its work
    import numpy as np
    from numpy.typing import NDArray

SHOWN = 300
"""Characters of the library's explanation that a message repeats."""


class GrammarFailed(EngineFailed):
    """The matcher of one request cannot go on; the other requests are not touched."""


class Grammar(Protocol):
    """Where one answer stands in its grammar. Not thread-safe: it belongs to one request."""

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""

    def mask(self) -> "NDArray[np.bool_]":
        """Which of the `vocab_size` tokens may come next; an end token exactly when the text so far is complete."""

    def allows(self, token_id: int) -> bool:
        """Whether the text may go on with a token, in a fraction of a mask's time.

        Where only one text can follow, the mask holds that text's longest token alone, and this any of its beginnings.
        """

    def advance(self, token_id: int) -> None:
        """Take a token that the mask allows. Replaying a request's output on a fresh `start()` gives the same state."""

    def copy(self) -> "Grammar":
        """An independent one at the same place."""


class Matcher:
    """`Grammar` over llguidance. Its first error is its last: every later call raises it again."""

    def __init__(self, matcher: llguidance.LLMatcher, ends: tuple[int, ...], size: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._size = size
        self._vocab_size = vocab_size
        self._ready: NDArray[np.bool_] | None = None
        """The tokens that fit here, where `look_ahead` has found them."""

    @property
    def finished(self) -> bool:
        """See `Grammar.finished`."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> "NDArray[np.bool_]":
        """See `Grammar.mask`. GrammarFailed if no token fits: a limit was hit, or the grammar has a dead end here."""
        allowed = unpack(self._matcher.compute_bitmask(), self._vocab_size) if self._ready is None else self._ready
        self._check()
        allowed[self._size :] = False
        allowed[list(self._ends)] = self._matcher.is_accepting()
        if not allowed.any():
            raise GrammarFailed("structured output: the grammar allows no token here")
        return allowed

    def allows(self, token_id: int) -> bool:
        """See `Grammar.allows`."""
        if token_id in self._ends:
            return self._matcher.is_accepting()
        return token_id < self._size and self._matcher.validate_tokens([token_id]) == 1

    def advance(self, token_id: int) -> None:
        """See `Grammar.advance`. GrammarFailed if the token does not fit."""
        self._ready = None
        self._matcher.consume_token(token_id)
        self._check()

    def copy(self) -> "Matcher":
        """See `Grammar.copy`."""
        return Matcher(self._matcher.deep_copy(), self._ends, self._size, self._vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"structured output: {reason(self._matcher)}")


def look_ahead(grammars: Iterable[Grammar]) -> None:
    """Work out the masks of several answers side by side, on threads of their own; `mask` then has them at hand."""
    import numpy as np

    matchers = [each for each in grammars if isinstance(each, Matcher) and not each._matcher.is_error()]
    if len(matchers) < 2:
        return
    size = matchers[0]._vocab_size
    bits = np.zeros((len(matchers), -(-size // 32)), dtype=np.int32)
    places = [(each._matcher, row) for row, each in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(places, bits.ctypes.data, bits.shape[1] * 4, len(matchers))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=size, bitorder="little").view(np.bool_)
    for each, row in zip(matchers, allowed, strict=True):
        each._ready = row


@cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor(len(os.sched_getaffinity(0)))


def unpack(bits: bytes, size: int) -> "NDArray[np.bool_]":
    """The first `size` bits, lowest bit of each byte first, as booleans."""
    import numpy as np

    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little").view(np.bool_)


class CompiledGrammar:
    """A grammar bound to a vocabulary; any number of answers may follow it at once."""

    def __init__(self, first: Matcher, size_bytes: int) -> None:
        self._first = first
        self._lock = threading.Lock()  # the library refuses to copy what another thread is copying
        self.size_bytes = size_bytes
        """About what it holds in memory."""

    def start(self) -> Grammar:
        """A matcher before the first token."""
        with self._lock:
            return self._first.copy()


def reason(matcher: llguidance.LLMatcher) -> str:
    """The library's explanation as one short line; it says where: line and column of a grammar, character of a regex."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    if text.strip().startswith("NoExtension"):
        return "no text matches it"
    regex = re.search(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: (.*)", text)
    if regex:
        return f"regex, character {len(regex[1]) + 1}: {regex[2]}"
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
