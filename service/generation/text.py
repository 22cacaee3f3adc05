"""Incremental detokenization of an answer: whole characters, stop strings, text that may be sent."""

from collections.abc import Mapping
from functools import lru_cache

from attend.model.params import StopRules
from attend.model.text.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Text of one answer. Holds back only text that may still become a stop string.

    Of an answer that is split into parts, its content alone passes through `show`.

    Law: the pieces put together are the decoded tokens, cut before (or, with include_stop_str_in_output, after) the first stop
    string that ends after token `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopRules,
        *,
        skip_special_tokens: bool,
        visible_tokens: Mapping[int, str] | None = None,
    ) -> None:
        """`visible_tokens` are special tokens that are text all the same."""
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens, visible_tokens=visible_tokens)
        self._stops = stops
        self._searches = [StopSearch(stop) for stop in stops.stop]
        self._held = ""
        self.num_tokens = 0

    def decode(self, token_id: int | None) -> str:
        """The text that one more token settles; None for the end of the answer."""
        if token_id is None:
            return self._decoder.flush()
        self.num_tokens += 1
        return self._decoder.push(token_id)

    def show(self, piece: str, *, last: bool = False) -> tuple[str, str | None]:
        """What can be shown of the text so far, and the stop string that ended it with this piece.

        `last`: the text ends here; what comes next begins another, which no stop string reaches into.
        """
        if not self._searches:
            return piece, None
        ends = [(search.feed(piece), search.stop) for search in self._searches]
        text = self._held + piece
        if self.num_tokens > self._stops.min_tokens:
            found = [(len(self._held) + end - len(stop), stop) for end, stop in ends if end]
            if found:
                at, stop = min(found)
                return text[: at + len(stop) if self._stops.include_stop_str_in_output else at], stop
        if last:
            for search in self._searches:
                search.matched = 0
        keep = max(search.matched for search in self._searches)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


class StopSearch:
    """Looks for one stop string in a text that comes in pieces (Knuth, Morris and Pratt 1977).

    A character costs about the same whatever the text and the stop string: at most 13 comparisons for 256 characters.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters at the end of the text so far that are a beginning of the stop string, and not all of it."""
        self._next, self._rest = _fallbacks(stop)

    def feed(self, piece: str) -> int:
        """Take a piece in. Where the stop string first ends in it, as a count of the piece's characters; 0 for nowhere."""
        stop, matched, first = self.stop, self.matched, 0
        if not matched and stop[0] not in piece:
            return 0
        for count, character in enumerate(piece, start=1):
            while matched >= 0 and stop[matched] != character:
                matched = self._next[matched]
            matched += 1
            if matched == len(stop):
                first, matched = first or count, self._rest
        self.matched = matched
        return first


@lru_cache(1024)
def _fallbacks(stop: str) -> tuple[list[int], int]:
    """Where the search goes on after a mismatch at each place of a stop string, -1 for the next character; and after all of it.

    It goes on after the longest shorter match that the same character does not refuse again.
    """
    after, border = [-1], 0
    for at in range(1, len(stop)):
        after.append(after[border] if stop[at] == stop[border] else border)
        while border >= 0 and stop[at] != stop[border]:
            border = after[border]
        border += 1
    return after, border
