"""From an answer's tokens to its text: whole characters, stop strings, and what may be shown already."""

from model.params import StopRules
from model.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Text of one answer. Holds back only what may still turn out to belong to a stop string.

    Law: the pieces put together are the decoded tokens, cut before (or, with include_stop, after) the first stop
    string that ends after token `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopRules, *, skip_special_tokens: bool) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = stops
        self._held = ""
        self._num_tokens = 0

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that can be shown after one more token, and the stop string that ended the answer with it."""
        self._num_tokens += 1
        piece = self._decoder.push(token_id)
        return self._show(piece, last=False) if self._stops.stop else (piece, None)

    def finish(self) -> tuple[str, str | None]:
        """What was held back, at the end of the answer."""
        piece = self._decoder.flush()
        return self._show(piece, last=True) if self._stops.stop else (piece, None)

    def _show(self, piece: str, *, last: bool) -> tuple[str, str | None]:
        text = self._held + piece
        if self._num_tokens > self._stops.min_tokens:
            # What is held holds no whole stop string, but for one that came within min_tokens and is text for good.
            found = [(text.find(stop, max(0, len(self._held) + 1 - len(stop))), stop) for stop in self._stops.stop]
            at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, ""))
            if stop:
                return text[: at + len(stop) if self._stops.include_stop else at], stop
        keep = 0 if last else longest_overlap(text, self._stops.stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def longest_overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
