"""What stands beside tokenizer.json counts as it does for `transformers`; a folder without it is told how to make it."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from attend.model.errors import CheckpointError, EngineFailed, InvalidRequest
from attend.model.text.tokenizer import Tokenizer
from attend.model.text.tokenizer_files import end_tokens
from tests.model.tokenizers import complete

TEXTS = ["the cat", "<|new|> the<|new|>cat", "sat <|turn|>x", "<image> then <|b|><|a|>  the[PAD]", " at at<s>", "<|tool|>"]


def write(folder: Path, kind: str = "gpt2", **files: object) -> Path:
    """A folder with a tokenizer and JSON files, `tokenizer_config` for one."""
    complete(kind).save(str(folder / "tokenizer.json"))
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def token(text: str, **flags: bool) -> dict[str, object]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


SIZE = complete("gpt2").get_vocab_size()
LISTED = {"added_tokens_decoder": {str(SIZE + 1): token("<|b|>", lstrip=True), str(SIZE): token("<|new|>", special=False)}}
FILES = {
    "nothing": {},
    "listed with ids": {"tokenizer_config": LISTED},
    "listed, and the older file not read": {"tokenizer_config": LISTED, "special_tokens_map": {"eos_token": "the"}},
    "listed with other flags": {"tokenizer_config": {"added_tokens_decoder": {str(SIZE - 8): token("<s>", rstrip=True)}}},
    "in an older file": {"added_tokens": {"<|b|>": SIZE + 1, "<|new|>": SIZE}, "tokenizer_config": {"eos_token": "<|b|>"}},
    "special by name": {"tokenizer_config": {"eos_token": "at", "pad_token": {"__type": "AddedToken", **token("the")}}},
    "special by an older file": {"special_tokens_map": {"eos_token": token("at"), "unk_token": "at"}},
    "special by a list": {"tokenizer_config": {"additional_special_tokens": ["at", "the"]}},
    "special by a newer list": {"tokenizer_config": {"extra_special_tokens": ["at"], "additional_special_tokens": []}},
    "special by the model's own name": {"tokenizer_config": {"image_token": "at"}},
    "special by a table": {"tokenizer_config": {"extra_special_tokens": {"image_token": "at"}}},
    "split in texts": {"tokenizer_config": {"split_special_tokens": True}},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES.keys())
def test_tokens_that_other_files_name_are_those_of_transformers(files, tmp_path):
    ours, theirs = Tokenizer.load(write(tmp_path, **files)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ids == ours.encode(text)
        for skip in (True, False):
            shown = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert shown == ours.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"x": token("<|new|>")}}},
        {"tokenizer_config": {"added_tokens_decoder": {"1": "<|new|>"}}},
        {"tokenizer_config": {"added_tokens_decoder": {"1": {"content": 7}}}},
        {"tokenizer_config": {"added_tokens_decoder": [1]}},
        {"added_tokens": {"<|new|>": "x"}},
        {"added_tokens": []},
        {"special_tokens_map": 7},
    ],
    ids=str,
)
def test_a_special_token_that_cannot_be_read_stops_the_load(files, tmp_path):
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path))}"):
        Tokenizer.load(write(tmp_path, **files))


def test_a_text_that_the_tokenizer_has_nothing_for_is_the_callers_error(tmp_path):
    described = json.loads(complete("unigram").to_str())
    described["model"] |= {"unk_id": None}
    described["added_tokens"] = [each for each in described["added_tokens"] if each["content"] != "<unk>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the cat")
    with pytest.raises(InvalidRequest, match=r"^prompt: this model's tokenizer cannot take the text") as caught:
        tokenizer.encode("\ue000")
    assert caught.value.field == "prompt"


# --- folders without tokenizer.json


def test_a_tokenizer_in_another_form_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing: `AutoTokenizer\.save_pretrained`"):
        Tokenizer.load(tmp_path)


QWEN = ["<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
ENDS = {
    "of no file": ([], {}, []),
    "by its name": (["<|im_end|>"], {"tokenizer_config": {"eos_token": "<|im_end|>"}}, ["<|im_end|>"]),
    "with flags": (["<|b|>"], {"tokenizer_config": {"eos_token": token("<|b|>")}}, ["<|b|>"]),
    "in an older file": ([], {"special_tokens_map": {"eos_token": "<s>"}}, ["<s>"]),
    "of the vocabulary": ([], {"tokenizer_config": {"eos_token": "at"}}, ["at"]),
    "listed with ids": ([], {"tokenizer_config": LISTED | {"eos_token": "<|b|>"}}, ["<|b|>"]),
    "listed without it": ([], {"tokenizer_config": LISTED | {"eos_token": "at"}}, ["at"]),
    "added by an older file": ([], {"added_tokens": {"<|b|>": SIZE}, "tokenizer_config": {"eos_token": "<|b|>"}}, ["<|b|>"]),
    "not there": ([], {"tokenizer_config": {"eos_token": "<|no|>"}}, []),
    "damaged": ([], {"tokenizer_config": {"eos_token": 7, "added_tokens_decoder": [1]}}, []),
    "after code of Qwen": (QWEN, {}, QWEN[1:]),
    "after code of StarCoder": (["<fim_middle>", "<file_sep>", "<repo_name>"], {}, ["<repo_name>", "<file_sep>"]),
    "with ids that are none": ([], {"tokenizer_config": {"eos_token": "<|b|>"}, "added_tokens": {"<|b|>": -1}}, []),
    "words that no code is filled in with": (QWEN[1:], {}, []),
}


@pytest.mark.parametrize(("added", "files", "ends"), ENDS.values(), ids=ENDS)
def test_answers_end_with_the_tokenizers_own_end_and_after_infilled_code(added, files, ends, tmp_path):
    raw = RawTokenizer.from_str(complete("gpt2").to_str())
    raw.add_tokens([AddedToken(text, special=False) for text in added])
    write(tmp_path, **files)
    raw.save(str(tmp_path / "tokenizer.json"))
    found = end_tokens(tmp_path)
    ids = Tokenizer.load(tmp_path).raw.token_to_id if ends else None
    assert found == tuple(ids(text) for text in ends)


@pytest.mark.parametrize("adds", [(True, True), (True, False), (False, True), (None, "yes")], ids=str)
@pytest.mark.parametrize("of_bytes", [True, False])
@pytest.mark.parametrize("has", [(), ("bos",), ("eos",), ("bos", "eos")], ids=str)
def test_start_and_end_are_added_where_the_file_asks_for_them_and_the_post_processor_adds_none(adds, has, of_bytes, tmp_path):
    folder = write(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": "at"}
        | dict(zip(("add_bos_token", "add_eos_token"), adds, strict=True)),
    )
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = processors.ByteLevel(trim_offsets=False) if of_bytes else None
    ids = {"bos": raw.token_to_id("<s>"), "eos": raw.token_to_id("at")}
    single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in has]
    if has:
        template = processors.TemplateProcessing(single=single, special_tokens=[(name, ids[name]) for name in has])
        raw.post_processor = processors.Sequence([raw.post_processor, template]) if of_bytes else template
    raw.save(str(folder / "tokenizer.json"))
    tokenizer, wanted = Tokenizer.load(folder), {*has, *(n for n, add in zip(ids, adds, strict=True) if add is True)}
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    for found in (tokenizer.encode("the cat"), tokenizer.encode("the cat", literals=[(0, 3)])):
        assert found == [ids["bos"]] * ("bos" in wanted) + plain + [ids["eos"]] * ("eos" in wanted)


def test_a_panic_of_a_later_call_is_an_error_of_that_call(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    tokenizer.raw = Panicking()
    for call in (
        tokenizer.encode,
        lambda text: tokenizer.encode(text, literals=[(0, 1)]),
        lambda text: tokenizer.first(text, 1),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer cannot take the text: slice index"):
            call("ab")
    with pytest.raises(EngineFailed, match="cannot decode its tokens: slice index"):
        tokenizer.decode([1])


class Panicking:
    """A tokenizer that can do nothing, in the way of PyO3."""

    def __getattr__(self, name):
        def fail(*args, **kwargs):
            raise type("PanicException", (BaseException,), {})("slice index starts at 2")

        return fail
