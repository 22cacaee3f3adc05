"""Every kind of tokenizer that published checkpoints have: the tokens are those of `transformers`, the stream is the text."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from attend.model.text.tokenizer import StreamDecoder, Tokenizer
from tests.conftest import examples
from tests.model.tokenizers import KINDS, complete

law = settings(max_examples=examples(30), derandomize=True, deadline=None)
kinds = pytest.mark.parametrize("kind", list(KINDS))

NASTY = [
    *("", " ", "   ", "\n", "\r\n\r\n", "\t", "\x00", "a\x00b", "a\r\nb\rc\n"),
    *("  leading", "trailing  ", "in   between", "the cat\n  sat ", " \u00a0\u3000\u2028x\u200b"),
    *("👩‍👩‍👧 👩🏽‍🚀 🏳️‍🌈", "e\u0301 é a\u0308\u0323", "\ue000\uf8ff\U000f0000", "\ufeffx\ufffd", "שלום עולם ‏abc‎ مرحبا"),
    *("日本語のテキスト", "x" * 5000, "日" * 500, "1234567890 3.14", "▁a ▁▁ b", "Ġthe <0x41> <0xFF> ##ing</w>"),
    *("<s>", "the </s> cat", "<|x|>  <|x|>", " <|x|> the <|y|>x", "<|turn|>user\nhi<|turn|>", "<|tur", "<tool>a <TOOL> <tool"),
    *("zz azz zz.zza", "né née  né", "It's don't I'LL we've", "<unk> <pad>", "don 't , x . y !"),
]
PARTS = st.sampled_from(NASTY[:-20] + NASTY[-14:]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer(complete(kind))


@cache
def theirs(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=complete(kind))


@kinds
@pytest.mark.parametrize("special", [True, False])
def test_a_text_has_the_tokens_that_transformers_gives_it(kind, special):
    for text in NASTY:
        assert theirs(kind).encode(text, add_special_tokens=special) == ours(kind).encode(text, add_special_tokens=special)


@kinds
@law
@given(parts=st.lists(PARTS, max_size=4))
def test_any_texts_have_the_tokens_that_transformers_gives_them(kind, parts):
    text = "".join(parts)
    assert theirs(kind).encode(text) == ours(kind).encode(text)


@kinds
@pytest.mark.parametrize("skip", [True, False])
def test_the_tokens_of_a_text_are_decoded_as_transformers_does(kind, skip):
    for text in NASTY:
        ids = ours(kind).encode(text)
        shown = theirs(kind).decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert shown == ours(kind).decode(ids, skip_special_tokens=skip), text


def assert_every_prefix_streams(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """Cut after any token: the pieces so far and what a flush adds are the text of the tokens so far."""
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    for cut in range(len(ids) + 1):
        stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
        sent = "".join([stream.push(token) for token in ids[:cut]])
        assert whole.startswith(sent)
        assert sent + stream.flush() == tokenizer.decode(ids[:cut], skip_special_tokens=skip)


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Tokens in any order, most of them no text, and ids without a token among them; or a text's, cut anywhere."""
    known = sorted(tokenizer.raw.get_vocab(with_added_tokens=True).values())
    added = sorted(tokenizer.raw.get_added_tokens_decoder())
    some = st.sampled_from(known) | st.sampled_from(added) | st.integers(0, known[-1] + 3)
    written = st.tuples(st.sampled_from(NASTY), st.integers(0, 8), st.integers(1, 14))
    cut = written.map(lambda each: tokenizer.encode(each[0])[each[1] : each[1] + each[2]])
    return st.lists(st.lists(some, max_size=6) | cut, max_size=3).map(lambda parts: [token for part in parts for token in part])


@kinds
@law
@given(data=st.data(), skip=st.booleans())
def test_every_prefix_of_any_tokens_streams_as_it_is_decoded(kind, data, skip):
    assert_every_prefix_streams(ours(kind), data.draw(tokens_of(ours(kind))), skip)


@kinds
def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(kind):
    """Up to the space that some kinds write before a text."""
    for text in ("the cat sat", "naïve café 日本語 😀"):
        ids = ours(kind).encode(text, add_special_tokens=False)
        joined = b"".join(ours(kind).bytes_of(token) for token in ids)
        assert ours(kind).decode(ids).encode().removeprefix(b" ") == joined.removeprefix(b" ")


@pytest.mark.parametrize("kind", ["gpt2", "nested", "llama2", "gemma", "unigram_bytes"])
@pytest.mark.parametrize("stray", [0, 1, 14, 15, 16, 17, 40])
def test_bytes_that_are_no_character_do_not_hide_the_next_one(kind, stray):
    """However many of them come before it."""
    tokenizer = ours(kind)
    of_byte = {tokenizer.bytes_of(token): token for token in range(tokenizer.size - 8) if len(tokenizer.bytes_of(token)) == 1}
    ids = [of_byte[bytes([byte])] for byte in b"\x95" * stray + "€".encode()]
    assert_every_prefix_streams(tokenizer, ids, skip=True)
    assert tokenizer.decode(ids) == "\ufffd" * stray + "€"


ADDED = ["für", "đem", "ilÖveyou", "ü", "čaj", "<|é|>", "è ", "İstanbul"]
"""Added tokens whose letters are those of bytes, or beyond them."""


def with_letters(kind: str, *, trained: bool = False) -> Tokenizer:
    """A byte-level tokenizer with these tokens, one of them special; `trained`: its vocabulary has them too."""
    described = json.loads(KINDS[kind]().to_str())
    if trained:
        vocabulary = described["model"]["vocab"]
        vocabulary |= {word: len(vocabulary) + at for at, word in enumerate(ADDED) if word not in vocabulary}
    raw = RawTokenizer.from_str(json.dumps(described))
    raw.add_tokens([AddedToken(word, normalized=word == "đem", single_word=word == "für") for word in ADDED if word != "<|é|>"])
    raw.add_special_tokens([AddedToken("<|é|>", lstrip=True, rstrip=True, normalized=False)])
    return Tokenizer(raw)


byte_level = pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "nested"])


@byte_level
@pytest.mark.parametrize("trained", [False, True])
def test_an_added_token_is_its_own_text_whatever_its_letters(kind, trained):
    """The library takes them for letters of bytes: "für" would be f, a broken byte, and r."""
    tokenizer = with_letters(kind, trained=trained)
    for text in ("ich für dich", "đem về", "I ilÖveyou!", "Tür ü", "čaj", "naïve café 日本語 für đem 😀", "è İstanbul"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")  # one kind writes some before words
        assert_every_prefix_streams(tokenizer, ids, skip=True)
        assert b"".join(map(tokenizer.bytes_of, ids)).decode() == tokenizer.decode(ids)
    for word in ADDED:
        token = tokenizer.raw.token_to_id(word)
        assert (tokenizer.text_of(token), tokenizer.bytes_of(token)) == (word, word.encode())
    special = tokenizer.raw.token_to_id("<|é|>")
    assert tokenizer.decode([special]) == "" and tokenizer.decode([special], skip_special_tokens=False) == "<|é|>"


@pytest.mark.parametrize("word", ["Ġthe", "Ċ", "Ä"])
def test_a_word_of_the_vocabulary_that_texts_have_keeps_its_bytes_where_it_is_an_added_token_too(word):
    raw = KINDS["gpt2"]()
    assert raw.token_to_id(word) is not None
    raw.add_tokens([AddedToken(word, normalized=False)])
    tokenizer, plain = Tokenizer(raw), Tokenizer(KINDS["gpt2"]())
    ids = plain.encode("in the\nć")
    assert tokenizer.decode(ids) == plain.decode(ids) == "in the\nć"


def test_a_decoder_that_does_more_than_join_bytes_streams_characters_whole():
    raw = complete("nested")
    raw = type(raw).from_str(raw.to_str())
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(raw)
    ids = tokenizer.encode("the 👩🏽‍🚀 cat 日本語 \ue000")
    assert_every_prefix_streams(tokenizer, ids, skip=True)
    stream = StreamDecoder(tokenizer)
    assert not any("\ufffd" in stream.push(token) for token in ids)
