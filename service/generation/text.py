"""Incremental detokenization of an answer: whole characters, stop strings, text that may be sent."""

from collections.abc import Mapping

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
        self._held = ""
        self._matched = dict.fromkeys(stops.stop, 0)
        """Characters at the end of the text that are a beginning of each stop string, and not all of it."""
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
        if not self._stops.stop:
            return piece, None
        text, held = self._held + piece, len(self._held)
        if self.num_tokens > self._stops.min_tokens:
            starts = [(text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stops.stop]
            found = [(at, stop) for at, stop in starts if at >= 0]
            if found:
                at, stop = min(found)
                return text[: at + len(stop) if self._stops.include_stop_str_in_output else at], stop
        for stop, matched in self._matched.items():
            # only so many can match now: each character is looked at a few times, however long the stop string is
            sizes = range(0 if last else min(matched + len(piece), len(stop) - 1), 0, -1)
            self._matched[stop] = next((size for size in sizes if text.endswith(stop[:size])), 0)
        keep = max(self._matched.values())
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None
