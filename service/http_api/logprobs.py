"""Log probabilities in the shape of OpenAI's completions: four parallel lists, with offsets into the text."""

from collections.abc import Iterable
from typing import Any

from model.engine.request import TokenLogprob
from model.tokenizer import StreamDecoder, Tokenizer
from service.records import Chunk, PromptPart

FLOOR = -9999.0
"""JSON has no -inf."""


def finite(value: float) -> float:
    """A log probability that JSON can hold."""
    return max(value, FLOOR)


class CompletionLogprobs:
    """The lists of one answer, as its chunks come. Offsets count the characters that the answer has shown before."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = top
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._echo = echo
        self._offset = 0

    def skip(self, received: Iterable[int]) -> None:
        """Go past tokens that the caller has already: the lists that follow are the tail of the whole answer's."""
        for token in received:
            self._offset += len(self._decoder.push(token))

    def of(self, chunk: Chunk) -> dict[str, list[Any]]:
        """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset` of a chunk; of the prompt too where it is echoed."""
        rows: list[tuple[int, TokenLogprob | None]] = [(scored.token_id, scored) for scored in chunk.logprobs]
        if self._echo and chunk.prompt is not None:
            lists = self._lists(self._prompt(chunk.prompt), self._prompt_decoder(chunk.prompt))
            self._offset = len(chunk.prompt.text)  # the answer's text begins after the prompt's, whatever that ended in
            answer = self._lists(rows, self._decoder)
            return {name: [*values, *answer[name]] for name, values in lists.items()}
        return self._lists(rows, self._decoder)

    def _prompt_decoder(self, prompt: PromptPart) -> StreamDecoder:
        """Special tokens have a place in the prompt's text where they were written in it, and none where they were added."""
        written = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
        return StreamDecoder(self._tokenizer, skip_special_tokens=not written)

    def _prompt(self, prompt: PromptPart) -> list[tuple[int, TokenLogprob | None]]:
        """The prompt's tokens: nothing comes before the first, so it has no probability."""
        scores = [None, *prompt.logprobs] if prompt.logprobs else [None] * len(prompt.token_ids)
        return list(zip(prompt.token_ids, scores, strict=True))

    def _lists(self, rows: Iterable[tuple[int, TokenLogprob | None]], decoder: StreamDecoder) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, scored in rows:
            lists["tokens"].append(self._tokenizer.text_of(token))
            lists["token_logprobs"].append(None if scored is None else finite(scored.logprob))
            lists["top_logprobs"].append(None if scored is None else self._top(scored))
            lists["text_offset"].append(self._offset)
            self._offset += len(decoder.push(token))
        return lists

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the token itself: so there may be one more than was asked for."""
        pairs = (*scored.top[: self._num_top], (scored.token_id, scored.logprob))
        return {self._tokenizer.text_of(token): finite(value) for token, value in pairs}


def prompt_logprobs(prompt: PromptPart, top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Of each prompt token: null for the first, then {token id: {logprob, decoded_token}} of the `top` likeliest and itself."""
    rows: list[dict[str, Any] | None] = [None]
    for scored in prompt.logprobs:
        pairs = (*scored.top[:top], (scored.token_id, scored.logprob))
        rows.append({str(t): {"logprob": finite(v), "decoded_token": tokenizer.text_of(t)} for t, v in pairs})
    return rows
