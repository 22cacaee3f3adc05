"""A limit on the tokens of reasoning: then its end marker is forced, and the answer follows."""

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attend.model.text.mask import Grammar
from attend.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """The most tokens of reasoning, and the markers around it, of one model and call."""

    tokenizer: Tokenizer
    vocab_size: int
    begin: str
    """The marker that begins reasoning, such as `<think>`."""
    end: str
    """The marker that ends reasoning, such as `</think>`."""
    anywhere: bool
    """True if reasoning may begin after other text: where an answer is a row of messages."""
    budget: int
    """Tokens of reasoning, without the end marker's."""


class ReasoningBudget:
    """`Grammar` that lets everything pass, or what another one does, until the budget is spent: then the end marker alone.

    What follows the marker is free again. The last character before it is whole. Markers are found in the text, since a token
    may hold one and more.
    """

    def __init__(self, limit: ReasoningLimit, inner: Grammar | None = None, *, is_open: bool = False) -> None:
        """`is_open`: the prompt ends inside reasoning."""
        self._limit = limit
        self._inner = inner
        self._open = is_open
        self._count = 0
        self._tail = b""
        """The end of the text, in which a marker may have begun."""
        self._closed = False
        """True if no reasoning can begin any more."""
        self._forced = limit.tokenizer.encode(limit.end, add_special_tokens=False)
        self._left: list[int] = [*self._forced] if is_open and not limit.budget else []
        """Tokens of the end marker that must come next."""

    @property
    def is_finished(self) -> bool:
        """See `Grammar.is_finished`."""
        return not self._left and self._inner is not None and self._inner.is_finished

    def mask(self) -> "NDArray[np.bool_]":
        """See `Grammar.mask`."""
        import numpy as np

        if not self._left:
            return np.ones(self._limit.vocab_size, dtype=np.bool_) if self._inner is None else self._inner.mask()
        allowed = np.zeros(self._limit.vocab_size, dtype=np.bool_)
        allowed[self._left[0]] = True
        return allowed

    def allows(self, token_id: int) -> bool:
        """See `Grammar.allows`."""
        if self._left:
            return token_id == self._left[0]
        return self._inner is None or self._inner.allows(token_id)

    def advance(self, token_id: int) -> None:
        """See `Grammar.advance`."""
        if self._inner is not None:
            self._inner.advance(token_id)
        if self._left:
            del self._left[0]
        was_open = self._open
        self._read(self._limit.tokenizer.bytes_of(token_id))
        self._count += was_open or self._open
        if self._open and not self._left and self._count >= self._limit.budget and _is_whole(self._tail):
            self._left = [*self._forced]

    def copy(self) -> "ReasoningBudget":
        """See `Grammar.copy`."""
        other = ReasoningBudget(self._limit, None if self._inner is None else self._inner.copy())
        other._open, other._count, other._tail, other._closed = self._open, self._count, self._tail, self._closed
        other._left = [*self._left]
        return other

    def _read(self, text: bytes) -> None:
        """Follow the text to its next marker."""
        if self._closed:
            return
        limit = self._limit
        self._tail += text
        marker = (limit.end if self._open else limit.begin).encode()
        _, found, rest = self._tail.partition(marker)
        if found:
            self._open, self._tail = not self._open, rest
        elif self._open or limit.anywhere:
            self._tail = self._tail[-len(marker) - 3 :]
        else:
            self._closed = not marker.startswith(self._tail.lstrip())


def _is_whole(text: bytes) -> bool:
    """True if a text does not end in the middle of a character."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(text)
    return not utf8.getstate()[0]
