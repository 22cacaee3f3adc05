"""Speculative decoding by prompt lookup: draft tokens, made from the text so far (Saxena 2023).

Text repeats itself: what followed the last few tokens when they last occurred is likely to follow now. A step can compute such
a draft together with a stream's next token, since reading the weights costs the same for one token as for some. Accepted are
the tokens that would have been sampled anyway: the one after each right draft token, and none after the first wrong one. So the
answer has the same tokens with and without drafts (Leviathan et al. 2023, for a draft without probabilities and draws that
are functions of seed and position).
"""

import sys
from array import array
from collections.abc import Sequence

from attend.model.engine.config import LONGEST_DRAFT
from attend.model.engine.request import Request

MATCH = 3
"""Tokens that must have occurred before."""
WINDOW = 4096
"""Tokens, counted from the end, in which they are looked for: a step must not wait for a long search."""
FIRST = 4
"""Length of a request's first draft."""
LONGEST_PAUSE = 64
_WIDTH = array("I").itemsize


class Lookup:
    """The text of one request, as it is searched, and how well its drafts do."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._length = FIRST
        self._misses = 0
        self._pause = 0

    def draft(self, request: Request, most: int) -> list[int]:
        """A guess at up to `most` next tokens; empty where the last tokens are new, or recent guesses were wrong."""
        self._follow(request)
        if self._pause:
            self._pause -= 1
            return []
        at = self._match()
        if at < 0:
            return []
        end = len(self._text) // _WIDTH
        period = end - at
        return [self._token(at + step % period) for step in range(min(most, self._length))]

    def learn(self, guessed: int, right: int) -> None:
        """Of a draft of `guessed` tokens the first `right` were drawn. Right ones make drafts longer, wrong ones rarer."""
        if right:
            self._misses = 0
            self._length = min(LONGEST_DRAFT, 2 * guessed if right == guessed else right + 1)
        else:
            self._length = FIRST
            self._pause = min(LONGEST_PAUSE, 1 << self._misses) - 1
            self._misses += 1

    def _follow(self, request: Request) -> None:
        """Index the tokens that are new since the last call."""
        known = len(self._text) // _WIDTH
        self._text += array("I", request.tokens(known, request.num_tokens - known)).tobytes()

    def _match(self) -> int:
        """Index of the token after the last earlier occurrence of the last MATCH tokens, or -1."""
        text, size = self._text, MATCH * _WIDTH
        if len(text) <= size:
            return -1
        pattern, at, end = text[-size:], 1, len(text) - 1
        while at % _WIDTH:  # bytes of two tokens may look like one
            at = text.rfind(pattern, max(0, len(text) - WINDOW * _WIDTH), end)
            if at < 0:
                return -1
            end = at + size - 1
        return at // _WIDTH + MATCH

    def _token(self, index: int) -> int:
        return int.from_bytes(self._text[index * _WIDTH : (index + 1) * _WIDTH], sys.byteorder)


def num_right(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a draft, from the first on, were drawn."""
    return next((at for at, (guess, token) in enumerate(zip(draft, drawn, strict=False)) if guess != token), len(draft))
