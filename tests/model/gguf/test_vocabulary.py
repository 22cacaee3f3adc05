"""The tokenizer and the chat template of a GGUF file are those that it was written from."""

import json
import random
from functools import cache
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers.tokenization_utils_sentencepiece import generate_merges

from attend.model.errors import CheckpointError
from attend.model.gguf.container import read_container
from attend.model.gguf.documents import json_file
from attend.model.gguf.vocabulary import BESIDE, HARMLESS, OFF, READ, Vocabulary
from attend.model.net.checkpoint import read_config
from attend.model.text.chat import ChatTemplate
from attend.model.text.tokenizer import StreamDecoder, Tokenizer
from tests.conftest import examples
from tests.model import tokenizers
from tests.model.gguf_files import byte_level, letters, make, scored, write_gguf
from tests.model.text.test_tokenizer_kinds import NASTY

law = settings(max_examples=examples(40), derandomize=True, deadline=None)
SPECIAL = ["<s>", "</s>", "<|turn|>"]
BYTE_LEVEL = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen": "qwen2"}
"""Kinds of tests/model/tokenizers.py, and what GGUF calls their splits."""
SCORED = {"llama2": True, "gemma": False}
"""Kinds, and whether a space is written before a text."""
MERGED = {"gemma4": "gemma"}
"""What GGUF calls a tokenizer of characters with its merges, and its kind."""
kinds = pytest.mark.parametrize("kind", [*BYTE_LEVEL, *SCORED, *MERGED])


def with_all_merges(raw: RawTokenizer) -> RawTokenizer:
    """The tokenizer that `transformers` makes of SentencePiece's scores: any two tokens that make a third may merge."""
    described = json.loads(raw.to_str())
    model = described["model"]
    said = scored(raw)
    whole = {word: place for place, word in enumerate(said["tokens"]) if said["token_type"][place] == 1}
    scores = {word: said["scores"][place] for word, place in whole.items()}
    model["merges"] = [list(pair) for pair in generate_merges(whole, scores)]
    return RawTokenizer.from_str(json.dumps(described))


@cache
def origin(kind: str) -> RawTokenizer:
    """A tokenizer with special and added tokens and a start token."""
    raw = tokenizers.KINDS[MERGED.get(kind, kind)]()
    raw = with_all_merges(raw) if kind in SCORED else raw
    unknown = [] if kind in BYTE_LEVEL else ["<unk>"]
    raw.add_special_tokens([AddedToken(text, normalized=False) for text in [*SPECIAL, *unknown]])
    raw.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("né ", normalized=False)])
    start = ("<s>", raw.token_to_id("<s>"))
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[start])
    return raw


def vocabulary(kind: str) -> dict[str, object]:
    """What GGUF says of it."""
    raw = origin(kind)
    ids = {"bos_token_id": raw.token_to_id("<s>"), "eos_token_id": raw.token_to_id("</s>"), "add_bos_token": True}
    if kind in SCORED:
        return scored(raw, add_space_prefix=SCORED[kind], unknown_token_id=raw.token_to_id("<unk>"), **ids)
    if kind in MERGED:
        return byte_level(raw, kind, model=kind, unknown_token_id=raw.token_to_id("<unk>"), **ids) | {"pre": None}
    return byte_level(raw, BYTE_LEVEL[kind], **ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make("llama", tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def loaded(folder, tmp_path_factory):
    @cache
    def load(kind: str) -> Tokenizer:
        path = tmp_path_factory.mktemp(kind) / "tiny.gguf"
        return Tokenizer.load(write_gguf(folder, path, tokens=vocabulary(kind)))

    return load


@kinds
@pytest.mark.parametrize("special", [True, False])
def test_a_text_has_the_tokens_of_the_tokenizer_that_it_was_written_from(kind, special, loaded):
    for text in NASTY:
        assert (
            loaded(kind).encode(text, add_special_tokens=special) == origin(kind).encode(text, add_special_tokens=special).ids
        ), text


@kinds
@law
@given(parts=st.lists(st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=4))
def test_any_texts_have_its_tokens(kind, parts, loaded):
    text = "".join(parts)
    assert loaded(kind).encode(text) == origin(kind).encode(text).ids


@kinds
@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_are_decoded_to_its_text(kind, skip, loaded):
    chance, size = random.Random(4), origin(kind).get_vocab_size()
    theirs = Tokenizer(origin(kind))
    for ids in [*(theirs.encode(text) for text in NASTY), *(chance.choices(range(size), k=9) for _ in range(60))]:
        assert loaded(kind).decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), ids
        stream = StreamDecoder(loaded(kind), skip_special_tokens=skip)
        assert "".join([*map(stream.push, ids), stream.flush()]) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_word_that_is_a_token_is_that_token_where_its_models_have_it_so(folder, tmp_path):
    """Whatever the merges, which lead to no `the` here."""
    raw = tokenizers.KINDS["gpt2"]()
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("dbrx", False), ("qwen2", False)):
        tokens = byte_level(raw, pre, merges=[], add_bos_token=False)
        tokenizer = Tokenizer.load(write_gguf(folder, tmp_path / f"{pre}.gguf", tokens=tokens))
        assert (tokenizer.encode("the") == [raw.token_to_id("the")]) is whole


def test_special_tokens_of_phi3_take_the_spaces_after_them(tmp_path):
    path = write_gguf(make("phi3", tmp_path / "theirs"), tmp_path / "tiny.gguf", tokens=vocabulary("llama2"))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<|turn|> \n the") == tokenizer.encode("<|turn|>the")
    assert tokenizer.encode("<s> the") != tokenizer.encode("<s>the")


TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
TALK = [{"role": "user", "content": " a < b &amp; é "}, {"role": "assistant", "content": "\n"}]


def test_the_chat_template_is_that_of_the_metadata(folder, tmp_path):
    said = {"tokenizer.chat_template": TEMPLATE, "tokenizer.chat_templates": ["tool_use"]}
    said |= {"tokenizer.chat_template.tool_use": "with {{ tools | length }} tools"}
    path = write_gguf(folder, tmp_path / "tiny.gguf", tokens=vocabulary("qwen"), metadata=said)
    ours, theirs = ChatTemplate.load(path), ChatTemplate(TEMPLATE, bos_token="<s>", eos_token="</s>")
    assert ours is not None and ours.render(TALK) == theirs.render(TALK) == "<s>" + "".join(
        f"<|turn|>{m['role']}\n{m['content']}</s>" for m in TALK
    )
    assert ours.render(TALK, [{}, {}]) == "with 2 tools"
    assert ChatTemplate.load(write_gguf(folder, tmp_path / "none.gguf")) is None


@pytest.mark.parametrize(
    ("words", "said", "ends"),
    [
        (["<|im_end|>", "<|endoftext|>"], {"eos": 0}, [0, 1]),
        (["a", "<|eot_id|>", "<|eom_id|>"], {"eos": 0, "eot": 1}, [0, 1, 2]),
        (["<|return|>", "<|call|>", "<|end|>"], {"eos": 0}, [0, 1]),
        (["<|end|>", "x"], {}, [0]),
        (["a", "b", "c"], {"eos": 1, "ids": [1, 2, 999]}, [1, 2]),
        (["<|endoftext|>", "[gMASK]", "<|observation|>", "<|user|>"], {"eot": 3}, [3, 0, 2]),
        (["<|user|>", "<|observation|>", "<|assistant|>", "<|tool_response>"], {}, []),
        (["a", "b", "c", "d"], {"eos": 0, "fim_pad": 1, "fim_rep": 2, "fim_sep": 3}, [0, 1, 2, 3]),
        (["<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {}, [1, 2, 3]),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {}, []),
    ],
)
def test_answers_end_with_the_named_ends_and_with_every_control_token_that_ends_a_turn(words, said, ends, folder, tmp_path):
    tokens = {"model": "gpt2", "pre": "gpt-2", "tokens": [*words, *(f"t{n}" for n in range(90))]}
    named = {"eos_token_ids" if name == "ids" else f"{name}_token_id": token for name, token in said.items()}
    tokens |= {"token_type": [3] * len(words) + [1] * 90} | named
    assert read_config(write_gguf(folder, tmp_path / "tiny.gguf", tokens=tokens)).eos_token_ids == tuple(ends)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(("arch", "word"), [("gemma4", "<|tool_response>"), ("phi3", "<|assistant|>")])
def test_an_end_that_only_the_makers_of_a_family_name_is_one_whatever_its_type(arch, word, kind, folder, tmp_path):
    tokens = {"model": "gpt2", "pre": "gpt-2", "tokens": [word, *(f"t{n}" for n in range(90))], "token_type": [kind] + [1] * 90}
    path = write_gguf(folder, tmp_path / "tiny.gguf", tokens=tokens)
    container = read_container(path)
    container.metadata["general.architecture"] = arch
    assert Vocabulary(container).ends == [0] and Vocabulary(container).kinds[0] == 3
    assert Vocabulary(read_container(path)).ends == []


WRITTEN = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot|>", "< EOT >", "<turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>")


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
@pytest.mark.parametrize("word", WRITTEN)
@pytest.mark.parametrize("name", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_an_end_that_the_chat_template_writes_is_a_special_token_whatever_its_type(folder, tmp_path, kind, word, name):
    """Whoever tunes a Llama for ChatML adds its tokens without making them special; llama.cpp ends there as well."""
    raw = tokenizers.KINDS["gpt2"]()
    raw.add_special_tokens(["<s>", "</s>", word, "<|im_start|>"])
    tokens = byte_level(raw, "gpt-2", eos_token_id=raw.token_to_id("</s>"))
    end = raw.token_to_id(word)
    tokens["token_type"][end] = kind
    said = {name: "{% for m in messages %}<|im_start|>{{ m.content }}" + word + "\n{% endfor %}"}
    path = write_gguf(folder, tmp_path / "tiny.gguf", tokens=tokens, metadata=said, change=lambda tensors: None)
    tokenizer = Tokenizer.load(path)
    assert json_file(path, "config.json")["eos_token_id"] == [raw.token_to_id("</s>"), end]
    assert tokenizer.encode(word) == [end] and tokenizer.decode([end]) == ""


BAD = {
    "model": ("bert", "tokenizer.ggml.model 'bert' is not supported; known: gpt2, llama, gemma4"),
    "pre": ("falcon", "tokenizer.ggml.pre 'falcon' is not supported; known: gpt-2"),
    "token_type": ([1, 1], "tokenizer.ggml.token_type has 2 elements for"),
    "tokens": (["a", "b", "a"], "tokens 0 and 2 are both 'a'"),
    "merges": (["ab"], "tokenizer.ggml.merges has 'ab', which is no pair"),
    "eos_token_id": ("yes", "tokenizer.ggml.eos_token_id must be one of"),
    "add_bos_token": ("yes", "tokenizer.ggml.add_bos_token must be true or false; got 'yes'"),
}


def test_every_key_of_the_tokenizer_is_read_known_to_change_nothing_or_refused(folder, tmp_path):
    theirs = {key for key in vars(gguf.Keys.Tokenizer).values() if isinstance(key, str) and key.startswith("tokenizer.")}
    ours = {f"tokenizer.ggml.{name}" for name in (*READ, *HARMLESS, *OFF)}
    assert {key for key in theirs - ours if not key.startswith(BESIDE)} == set()
    for key, value, told in (
        ("add_eot_token", True, "= True is not supported"),
        ("add_sep_token", True, None),
        ("added_tokens", ["a"], None),
        ("normalizer.nfc", True, "is an unknown key"),
        ("add_sep_token", False, None),
        ("mask_token_id", 3, None),
        ("padding_token_id", 5000, None),
    ):
        path = write_gguf(folder, tmp_path / "tiny.gguf", tokens=vocabulary("qwen"), metadata={f"tokenizer.ggml.{key}": value})
        if told is None:
            assert Tokenizer.load(path).size > 0
            continue
        with pytest.raises(CheckpointError, match=rf"tiny\.gguf: tokenizer\.ggml\.{key} {told}"):
            Tokenizer.load(path)


@pytest.mark.parametrize("key", list(BAD))
def test_a_vocabulary_that_makes_no_sense_is_refused_with_the_key(key, folder, tmp_path):
    value, sentence = BAD[key]
    changes = {key: value} | ({"token_type": [1, 1, 1]} if key == "tokens" else {})
    path = write_gguf(folder, tmp_path / "tiny.gguf", tokens=vocabulary("qwen") | changes)
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value) and sentence in str(error.value)


def test_a_padded_vocabulary_is_read_as_llama_cpp_reads_it(tmp_path):
    """Special ids beyond it are none, kinds of tokens may go on, empty words are no text, merges into no token fall apart."""
    tokens = letters()
    tokens["tokens"][3:5], tokens["token_type"] = ["", ""], [*tokens["token_type"], 5, 5]
    path = write_gguf(make("qwen3-tied", tmp_path / "theirs"), tmp_path / "m.gguf", tokens=tokens | {"padding_token_id": 96})
    assert [83, 71] == Tokenizer.load(path).encode("th")
    assert read_config(path).vocab_size == len(tokens["tokens"])
