"""Tokens to text in a stream: the pieces are the text, and no character is sent before it is certain."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from attend.model.errors import CheckpointError
from attend.model.text.tokenizer import StreamDecoder, Tokenizer
from attend.model.train.corpus import END_OF_TEXT
from tests.conftest import examples
from tests.model.checkpoints import byte_level_tokenizer, write_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
END = BYTE_LEVEL.bos_token_id
law = settings(max_examples=examples(150), derandomize=True, deadline=None)


def metaspace_tokenizer() -> Tokenizer:
    """Words start with ▁, and decoding drops the space before the first: what a token says depends on its place."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    texts = ["the cat sat on the mat", "a cat, a mat!"]
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"], show_progress=False))
    return Tokenizer(raw, 0)


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's kind: a character that is not in the vocabulary becomes one token for each of its bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "é", "▁h", "hi", "▁hi"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i")]
    raw = RawTokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return Tokenizer(raw)


METASPACE = metaspace_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def assert_stream_is_text(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    """The law, and that what was sent is at each moment a beginning of the whole; returns the pieces."""
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        assert whole.startswith("".join(pieces))
    pieces.append(stream.flush())
    assert whole == "".join(pieces)
    return pieces


ANY_IDS = st.lists(st.integers(0, BYTE_LEVEL.size - 1) | st.just(END), max_size=40)


@law
@given(ids=ANY_IDS, skip=st.booleans())
def test_streamed_text_is_decoded_text(ids, skip):
    """Any tokens at all, most of them not UTF-8: the pieces are the text, and none is ever taken back."""
    assert_stream_is_text(BYTE_LEVEL, ids, skip)


@law
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.size + 3), max_size=40), skip=st.booleans())
def test_ids_that_the_tokenizer_does_not_know_have_no_text(ids, skip):
    """A model may have more ids than its tokenizer."""
    assert_stream_is_text(BYTE_LEVEL, ids, skip)


def test_only_texts_that_are_their_tokens_bytes_joined_are_looked_up():
    tables = [each.alone(skip_special_tokens=True) for each in (BYTE_LEVEL, METASPACE, BYTE_FALLBACK)]
    assert [table is not None for table in tables] == [True, False, False]


TEXTS = st.text(max_size=20) | st.text(alphabet="😀👩‍🚀é日 the\n", max_size=20)


@law
@given(text=TEXTS)
def test_encoding_loses_nothing(text):
    assert text == BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False)


def test_what_never_becomes_a_character_comes_with_the_flush():
    emoji = BYTE_LEVEL.encode("🦀")
    stream = StreamDecoder(BYTE_LEVEL)
    assert [""] * (len(emoji) - 1) == [stream.push(token) for token in emoji[:-1]]
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_shown_only_when_asked_for():
    ids = [*BYTE_LEVEL.encode("the"), END, *BYTE_LEVEL.encode(" cat")]
    assert "".join(assert_stream_is_text(BYTE_LEVEL, ids, skip=True)) == "the cat"
    assert f"the{END_OF_TEXT} cat" == "".join(assert_stream_is_text(BYTE_LEVEL, ids, skip=False))


@pytest.mark.parametrize("document", [{}, {"bos_token": None}, {"bos_token": "<unknown>"}], ids=str)
def test_a_tokenizer_without_a_start_token_has_none(tmp_path, document):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")
    assert Tokenizer.load(tmp_path).bos_token_id is None


def damaged(folder: Path, content: bytes, name: str = "tokenizer.json") -> Path:
    write_tokenizer(folder)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "Unheard"}}', b"\xff\xfe"], ids=repr)
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(damaged(tmp_path, content))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"], ids=repr)
def test_a_damaged_tokenizer_config_is_named(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not a JSON object"):
        Tokenizer.load(damaged(tmp_path, content, "tokenizer_config.json"))
