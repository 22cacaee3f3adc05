"""What stands beside tokenizer.json counts as it does for `transformers`; a folder without it is told how to make it."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.text.tokenizer import Tokenizer
from tests.model.tokenizers import complete, gpt2

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


def test_a_special_token_that_nothing_gives_an_id_is_ordinary_text(tmp_path):
    """The model cannot know one: its text must not become an id beyond the vocabulary."""
    loaded = Tokenizer.load(write(tmp_path, tokenizer_config={"bos_token": "[BOS]", "pad_token": "[PAD]"}))
    assert loaded.bos_token_id is None
    assert max(loaded.encode("a [PAD] b [BOS]")) < SIZE
    assert SIZE == loaded.size


def test_the_start_token_may_stand_in_the_older_file_alone(tmp_path):
    loaded = Tokenizer.load(write(tmp_path, special_tokens_map={"bos_token": token("<s>")}))
    assert loaded.raw.token_to_id("<s>") == loaded.bos_token_id


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


def command_for(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    said = str(caught.value)
    assert said.startswith(f"{folder / 'tokenizer.json'} is missing: this command makes it of ")
    assert "\n" not in said
    return said.split(": pip install ", 1)[1].split(" && ", 1)[1]


OTHERS = [
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "spiece.model",
    "vocab.txt",
]


@pytest.mark.parametrize("name", OTHERS)
def test_a_tokenizer_in_another_form_is_refused_with_the_command_that_converts_it(name, tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / name).write_bytes(b"")
    program, option, code, argument = shlex.split(command_for(folder))
    assert ("python", "-c", str(folder)) == (program, option, argument)
    compile(code, "command", "exec")


def test_the_command_that_converts_a_tokenizer_makes_a_folder_that_loads(tmp_path, monkeypatch):
    """From the two files of byte-level tokenizers: the tokens are the same afterwards."""
    raw = gpt2()
    raw.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    _, *arguments = shlex.split(command_for(tmp_path))
    monkeypatch.setattr(sys, "argv", [arguments[0], *arguments[2:]])
    exec(arguments[1], {})  # as `python -c` does, without ten seconds of imports
    assert Tokenizer.load(tmp_path).encode("the cat") == raw.encode("the cat").ids


def test_a_folder_without_any_tokenizer_is_told_what_is_needed(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing: Attend needs the tokenizer in the `tokenizers`"):
        Tokenizer.load(tmp_path)
