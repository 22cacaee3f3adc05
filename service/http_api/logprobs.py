"""Log probabilities in OpenAI's shapes, with offsets into the text."""

from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any

from attend.model.engine.request import TokenLogprob
from attend.model.text.tokenizer import StreamDecoder, Tokenizer
from attend.service.contract import answers
from attend.service.records import Chunk, PromptPart

FLOOR = -9999.0
"""What minus infinity becomes, since JSON has none."""


def finite(value: float) -> float:
    """A log probability that JSON can hold."""
    return max(value, FLOOR)


def scored_token(tokenizer: Tokenizer, token_logprob: TokenLogprob, top: int) -> Any:
    """A token with its log probability and the `top` likeliest ones, as chats and responses have it."""

    def token_object(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.text_of(token), "logprob": finite(logprob), "bytes": list(tokenizer.bytes_of(token))}

    return token_object(token_logprob.token_id, token_logprob.logprob) | {
        "top_logprobs": [token_object(*each) for each in token_logprob.top[:top]]
    }


class CompletionLogprobs:
    """The lists of one answer, chunk by chunk. Offsets count the characters that the answer has shown before."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = top
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._echo = echo
        self._offset = 0

    def skip(self, tokens: Iterable[int]) -> None:
        """Go past tokens that the caller has already: the lists that follow are the tail of the whole answer's."""
        for token in tokens:
            self._offset += len(self._decoder.push(token))

    def of(self, chunk: Chunk) -> answers.CompletionLogprobs:
        """The lists of a chunk; of the prompt too where it is echoed. They are made while they are read, chunk by chunk."""
        return {
            "tokens": (self._tokenizer.text_of(token) for token, _ in self._rows(chunk)),
            "token_logprobs": (None if scored is None else finite(scored.logprob) for _, scored in self._rows(chunk)),
            "top_logprobs": (None if scored is None else self._top(scored) for _, scored in self._rows(chunk)),
            "text_offset": self._offsets(chunk),
        }

    def _rows(self, chunk: Chunk) -> Iterator[tuple[int, TokenLogprob | None]]:
        """Token ids and their scores. Nothing comes before the first token of a prompt, so it has no probability."""
        if self._echo and chunk.prompt is not None:
            yield from zip_longest(chunk.prompt.token_ids, chain([None], chunk.prompt.logprobs))
        yield from ((scored.token_id, scored) for scored in chunk.logprobs)

    def _offsets(self, chunk: Chunk) -> Iterator[int]:
        if self._echo and chunk.prompt is not None:
            offset, decoder = 0, self._prompt_decoder(chunk.prompt)
            for token in chunk.prompt.token_ids:
                yield offset
                offset += len(decoder.push(token))
            self._offset += len(chunk.prompt.text)  # the answer's text begins after the prompt's, whatever that ended in
        for scored in chunk.logprobs:
            yield self._offset
            self._offset += len(self._decoder.push(scored.token_id))

    def _prompt_decoder(self, prompt: PromptPart) -> StreamDecoder:
        """Special tokens have a place in the prompt's text where they were written in it, and none where they were added."""
        written = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
        return StreamDecoder(self._tokenizer, skip_special_tokens=not written)

    def _top(self, token_logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the token itself: so there may be one more than was asked for."""
        pairs = (*token_logprob.top[: self._num_top], (token_logprob.token_id, token_logprob.logprob))
        return {self._tokenizer.text_of(token): finite(value) for token, value in pairs}


def prompt_logprobs(prompt: PromptPart, top: int, tokenizer: Tokenizer) -> Iterator[dict[str, answers.ScoredToken] | None]:
    """Of each prompt token: null for the first, then {token id: {logprob, decoded_token}} of the `top` likeliest and itself."""
    yield None
    for scored in prompt.logprobs:
        pairs = (*scored.top[:top], (scored.token_id, scored.logprob))
        yield {str(t): {"logprob": finite(v), "decoded_token": tokenizer.text_of(t)} for t, v in pairs}
