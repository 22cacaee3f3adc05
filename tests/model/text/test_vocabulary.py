"""A tokenizer and a model that do not have the same ids: what is known to one alone harms nobody."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from attend.model.errors import NotSupported
from attend.model.text.grammar import GrammarCompiler, GrammarSpec
from attend.model.text.grammar_tokens import for_grammars
from attend.model.text.tokenizer import StreamDecoder, Tokenizer
from tests.model.tokenizers import ENDS, KINDS, complete

GAP = 10
"""Ids without a token before the added ones."""
PADDING = 37
"""Scores of the model beyond the last token."""


def with_a_gap(kind: str = "gpt2") -> Tokenizer:
    described = json.loads(complete(kind).to_str()) | {"post_processor": None}
    for token in described["added_tokens"]:
        token["id"] += GAP
        described["model"]["vocab"][token["content"]] = token["id"]
    return Tokenizer(RawTokenizer.from_str(json.dumps(described)))


def test_no_grammar_allows_an_id_without_a_token_and_every_end_is_reached():
    """In the middle of the vocabulary, beyond the tokenizer's end, and beyond the model's end."""
    tokenizer = with_a_gap()
    end = tokenizer.raw.token_to_id(ENDS)
    known = set(tokenizer.raw.get_vocab(with_added_tokens=True).values())
    for vocab_size in (tokenizer.size - 5, tokenizer.size, tokenizer.size + PADDING):
        grammar = GrammarCompiler(tokenizer, vocab_size, (end,)).compile(GrammarSpec("regex", "(the|[^a-z])( cat)+.*")).start()
        for token in [None, *tokenizer.encode("the cat")]:
            if token is not None:
                grammar.advance(token)
            mask = grammar.mask()
            assert len(mask) == vocab_size
            assert known >= {*np.flatnonzero(mask).tolist()}
        assert mask[end]


def test_a_drawn_id_without_a_token_has_no_text_and_a_name_of_its_own():
    """A model may draw one, as its reference does; what it says is nothing, and the text around it stays whole."""
    tokenizer = with_a_gap()
    silent = [tokenizer.size - 9, tokenizer.size + PADDING - 1]
    silent[0] = next(token for token in range(tokenizer.size) if tokenizer.raw.id_to_token(token) is None)
    half, other = [tokenizer.raw.token_to_id(letter) for letter in ("Ã", "©")]
    stream = StreamDecoder(tokenizer)
    assert ["", "", "", "é"] == [stream.push(token) for token in (half, *silent, other)]
    assert [b"", b""] == [tokenizer.bytes_of(token) for token in silent]
    assert [f"token_id:{token}" for token in silent] == [tokenizer.text_of(token) for token in silent]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_grammar_takes_a_text_in_the_tokens_of_every_kind_or_says_that_it_cannot(kind):
    tokenizer = Tokenizer(complete(kind))
    end = tokenizer.raw.token_to_id(ENDS)
    compiler = GrammarCompiler(tokenizer, tokenizer.size, (end,))
    if kind in ("metaspace", "unigram", "wordpiece"):
        with pytest.raises(NotSupported, match=r"^regex: not possible with this model's kind of tokenizer"):
            compiler.compile(GrammarSpec("regex", "x"))
        return
    grammar = compiler.compile(GrammarSpec("regex", " ?the cat (sat|é😀日)*")).start()
    for token in tokenizer.encode("the cat é😀日", add_special_tokens=False):
        assert grammar.allows(token)
        grammar.advance(token)
    assert grammar.mask()[end]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "nested", "llama2", "gemma"])
@pytest.mark.parametrize("words", [("für", "ü", "Ã¼", "né "), ("Ã¼", "ü", "日本")])
@pytest.mark.parametrize("gap", [False, True])
def test_a_grammar_reads_each_id_as_the_bytes_that_it_stands_for(kind, words, gap):
    """Whatever is added, in whichever order; what is special has no bytes in a grammar."""
    raw = KINDS[kind]()
    if gap:
        described = json.loads(raw.to_str())
        described["model"]["vocab"]["<far>"] = raw.get_vocab_size() + GAP
        raw = RawTokenizer.from_str(json.dumps(described))
    raw.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    raw.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>", *words)])
    tokenizer = Tokenizer(raw)
    special = {token for token in range(tokenizer.size) if tokenizer.says_nothing(token, skip_special_tokens=True)}
    read = for_grammars(tokenizer, tokenizer.size + PADDING, [raw.token_to_id("<|im_end|>")])
    assert all(read.is_special_token(token) for token in special)
    others = [token for token in range(tokenizer.size) if token not in special]
    others.remove(next(token for token in others if tokenizer.bytes_of(token) == b"\xff"))  # a mark of the library, no text
    assert not any(read.is_special_token(token) for token in others)
    assert {token: tokenizer.bytes_of(token) for token in others} == {token: read.decode_bytes([token]) for token in others}
