"""Speculative decoding by prompt lookup (an n-gram proposer): draft tokens, made from the texts so far (Saxena 2023).

What followed the last few tokens when they last occurred is likely to follow now. A step computes such a draft together with a
stream's next token. Accepted are the tokens that would have been sampled anyway, so the answer has the same tokens with and
without drafts (Leviathan et al. 2023, for a draft without probabilities and draws that are functions of seed and position).

An accepted draft makes an answer come sooner, which its caller can see. So a draft comes from texts of the same owner alone,
and like a cached prefix from those with the same adapter and cache salt.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import count
from zlib import crc32

from attend.model.engine.config import LONGEST_DRAFT
from attend.model.engine.plan import ScheduledTokens
from attend.model.engine.request import Request
from attend.model.engine.tables import BlockTables

MATCHES = 12, 3
"""Tokens that must have occurred before: the larger number where they have."""
SUREST = 6
"""And at least one more for each further stream of the step, up to so many: the more streams read the weights together, the
more a wrong draft token costs beside the tokens that the step draws anyway.
"""
FIRST = 4
"""Length of a request's first draft."""
LONGEST_PAUSE = 64
MAX_TOKENS = 1 << 16
"""Tokens of one owner's ended requests whose texts are kept; the last text is kept whatever its length."""
MAX_OWNERS = 32
PART_TOKENS = 256
"""Tokens of a request that a step indexes at most, in a quarter of a millisecond: a long prompt takes several steps."""
_WIDTH = array("I").itemsize
_SIZES = [_WIDTH * length for length in MATCHES]
_PLACES = 1 << 17


class Texts:
    """The texts of an owner's requests, of those that run and the last that have ended, with an index of their n-grams."""

    def __init__(self) -> None:
        self._places = memoryview(bytearray(8 * _PLACES)).cast("Q")
        """By the hash of an n-gram: the number of the text in which it occurred last, and the index of the token after it. Who
        reads it compares the tokens.
        """
        self._texts: dict[int, bytearray] = {}
        self._ended: deque[int] = deque()
        self._ended_bytes = 0
        self._numbers = count(1)

    def begin(self) -> tuple[int, bytearray]:
        """The number of a new text, and the text, to append tokens to."""
        number, text = next(self._numbers), bytearray()
        self._texts[number] = text
        return number, text

    def index(self, number: int, start: int, end: int) -> None:
        """Note which n-grams the tokens `start .. end - 1` of a text follow."""
        places, text = self._places, self._texts[number]
        for at in range(start, end):
            stop = at * _WIDTH
            for size in _SIZES:
                if stop >= size:
                    places[crc32(text[stop - size : stop]) % _PLACES] = number << 32 | at

    def find(self, text: bytearray, least: int) -> tuple[bytearray, int] | None:
        """A text in which the last tokens of `text`, at least so many, occur, and the index of the token after them."""
        for size in _SIZES:
            number, at = divmod(self._places[crc32(text[-size:]) % _PLACES], 1 << 32)
            found, whole = self._texts.get(number), max(size, least * _WIDTH)
            if found is not None and len(text) >= whole and found[at * _WIDTH - whole : at * _WIDTH] == text[-whole:]:
                return found, at
        return None

    def end(self, number: int) -> None:
        """A text does not grow any more. The oldest of such texts are dropped for it."""
        size = len(self._texts[number])
        while self._ended and self._ended_bytes + size > MAX_TOKENS * _WIDTH:
            self._ended_bytes -= len(self._texts.pop(self._ended.popleft()))
        self._ended.append(number)
        self._ended_bytes += size


class Lookup:
    """The text of one request among those of its owner, and how well its drafts do."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._number, self._text = texts.begin()
        self._indexed = 1
        self._length = FIRST
        self._misses = 0
        self._pause = 0

    def draft(self, request: Request, most: int, streams: int = 1) -> list[int]:
        """A guess at up to `most` next tokens, beside so many streams with it; empty where the last tokens are new, or recent
        guesses were wrong.
        """
        self._follow(request)
        if self._pause:
            self._pause -= 1
            return []
        found = self._texts.find(self._text, min(SUREST, MATCHES[-1] - 1 + streams))
        if found is None:
            return []
        text, at = found
        length = min(most, self._length)
        known = array("I", text[at * _WIDTH : (at + length) * _WIDTH]).tolist()
        return (known * length)[:length] if text is self._text else known  # what repeats itself goes on so

    def learn(self, num_drafted: int, right: int) -> None:
        """Note that `right` of a draft's `num_drafted` tokens were accepted: the next drafts become longer, or rarer."""
        if right:
            self._misses = 0
            self._length = min(LONGEST_DRAFT, 2 * num_drafted if right == num_drafted else right + 1)
        else:
            self._length = FIRST
            self._pause = min(LONGEST_PAUSE, 1 << self._misses) - 1
            self._misses += 1

    def end(self, request: Request) -> None:
        """The text is complete: keep it for others."""
        self._follow(request)
        self._texts.end(self._number)

    def _follow(self, request: Request) -> None:
        """Append and index the tokens that are new since the last call."""
        known, total = len(self._text) // _WIDTH, request.num_tokens
        self._text += array("I", request.tokens(known, total - known)).tobytes()
        end = min(total, self._indexed + PART_TOKENS)
        self._texts.index(self._number, self._indexed, end)
        self._indexed = end


class Lookups:
    """Makes the drafts of all requests."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str | None, str], Texts] = {}
        """Texts by owner, and adapter with cache salt; those whose requests began last are the last."""

    def guess(self, streams: Sequence[ScheduledTokens], most_tokens: int, tables: BlockTables) -> int:
        """Give streams that no prompt runs beside drafts, as long as each may have one; returns how many tokens they are."""
        share = most_tokens // len(streams) if streams else 0
        for item in streams if share else ():
            request = item.request
            most = min(share, request.max_tokens - len(request.output) - 1, tables.draft_room(request))
            if most > 0 and request.draws_from_scores:
                draft = self.of(request).draft(request, most, len(streams))
                room = request.reserved_tokens - request.num_tokens
                if len(draft) > room and not tables.grow(request, request.num_tokens + len(draft)):
                    draft = draft[:room]  # no request is preempted for a guess
                item.draft = draft
                tables.allocate(request, request.num_tokens + len(draft))
        return sum(len(item.draft) for item in streams)

    def of(self, request: Request) -> Lookup:
        """What makes a request's drafts, from the texts of its owner with the same adapter and cache salt."""
        if request.lookup is None:
            key = request.owner, request.root
            texts = self._texts[key] = self._texts.pop(key) if key in self._texts else Texts()
            if len(self._texts) > MAX_OWNERS:
                del self._texts[next(iter(self._texts))]
            request.lookup = Lookup(texts)
        return request.lookup


def num_right(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of a draft, from the first on, are the `tokens` that were drawn."""
    return next((at for at, (guess, token) in enumerate(zip(draft, tokens, strict=False)) if guess != token), len(draft))
