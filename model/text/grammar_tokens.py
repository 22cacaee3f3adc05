"""A tokenizer as llguidance reads it: the bytes of each token, and the tokens of a text that a grammar fully determines."""

from collections.abc import Callable, Sequence
from typing import Any

import llguidance

from attend.model.errors import InvalidRequest
from attend.model.text.tokenizer import Tokenizer

DECODERS = (b'"ByteLevel"', b'"ByteFallback"')
"""A tokenizer whose decoder has one of these says each byte of a text."""
LEADS = ("", "\n")
"""What a text is encoded after, one after the other: some tokenizers write a space before a text's first word."""


def for_grammars(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> llguidance.LLTokenizer:
    """The library's form of a tokenizer, for a model with `vocab_size` scores. ValueError where tokens are not bytes."""
    decoder = tokenizer.raw.decoder
    if decoder is None or not any(kind in decoder.__getstate__() for kind in DECODERS):
        raise ValueError("its decoder is neither ByteLevel nor ByteFallback")
    tokens = _Tokens(tokenizer, max(vocab_size, tokenizer.size), ends[0])
    wrapper: Any = llguidance.TokenizerWrapper(tokens)
    made = llguidance.LLTokenizer(wrapper, eos_token=list(ends))  # as many as `tokens`, whatever its n_vocab
    tokens.spell = made.greedy_tokenize
    return made


class _Tokens:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer. Special tokens, and ids without a token, are no text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, count: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.spell: Callable[[str], list[int]]
        """The longest tokens that a text begins with, again and again."""
        self._tokenizer = tokenizer
        ids = range(count)
        self._special = {token for token in ids if tokenizer.says_nothing(token, skip_special_tokens=True)}
        self.special_token_ids = sorted(self._special)
        self.tokens = [b"<|%d|>" % token if token in self._special else tokenizer.bytes_of(token) for token in ids]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text: as a prompt would have them, unless one of those is special or they are another text."""
        wanted = text.encode()
        for lead in LEADS:
            try:
                before, ids = (self._tokenizer.encode(each, add_special_tokens=False) for each in (lead, lead + text))
            except InvalidRequest:
                break
            rest = ids[len(before) :]
            whole = ids[: len(before)] == before and self._special.isdisjoint(rest)
            if whole and b"".join(self.tokens[token] for token in rest) == wanted:
                return rest
        return self.spell(text)
