"""generation_config.json: its end tokens always count, its defaults of sampling where asked for, its mistakes are named."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from attend.model.errors import CheckpointError
from attend.model.generation_config import CARRIED, HARMLESS, NO_DEFAULTS, OFF, read_defaults, stop_tokens
from attend.model.params import DecodingParams, SamplingParams
from tests.model.gguf_files import make, write_gguf


def write(folder: Path, **fields: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
ALL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize(("name", "value"), ALL.items())
def test_each_field_is_taken_by_itself(name, value, tmp_path):
    folder = write(tmp_path, **{name: value}, do_sample=True, transformers_version="5.23.0", pad_token_id=3, max_length=4096)
    assert read_defaults(folder).values() == PLAIN | {name: value}


def test_without_a_file_or_its_fields_the_defaults_are_our_own(tmp_path):
    assert read_defaults(tmp_path).values() == PLAIN == NO_DEFAULTS.values()
    assert read_defaults(write(tmp_path, **dict.fromkeys(ALL))) == NO_DEFAULTS
    assert NO_DEFAULTS.values() == {name: getattr(SamplingParams(), name, None) for name in list(PLAIN)[:4]} | {
        "repetition_penalty": DecodingParams().repetition_penalty
    }


BAD = [
    *[(name, value) for name in ALL for value in ("1", [], True, -2, float("nan"))],
    *(("temperature", 2.5), ("top_k", 1.5), ("top_p", 1.5), ("min_p", 2), ("repetition_penalty", 0)),
    *(("do_sample", 1), ("do_sample", "false"), ("num_beams", 4), ("no_repeat_ngram_size", 3), ("typical_p", 0.9)),
    *(("suppress_tokens", 1), ("suppress_tokens", [-1]), ("suppress_tokens", [True]), ("stop_strings", ["###"])),
    *(("watermarking_config", {"greenlist_ratio": 0.5}), ("token_healing", True), ("max_time", 5.0)),
    *(("begin_suppress_tokens", [1]), ("forced_eos_token_id", 2), ("min_new_tokens", 5), ("sequence_bias", [[[1], 2.0]])),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_value_or_one_that_is_not_carried_out_stops_the_start_with_file_and_field(name, value, tmp_path):
    folder = write(tmp_path, **{name: value})
    with pytest.raises(CheckpointError) as caught:
        read_defaults(folder)
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: {name} ")


def test_every_key_of_transformers_is_carried_out_refused_or_known_to_change_nothing(tmp_path, caplog):
    keys = vars(GenerationConfig()).keys()
    assert keys - HARMLESS - OFF.keys() - {*CARRIED} == set()
    assert not (HARMLESS & OFF.keys() or HARMLESS & {*CARRIED} or OFF.keys() & {*CARRIED})
    assert read_defaults(write(tmp_path, chat_format="x")) == NO_DEFAULTS
    assert "chat_format is not known, and changes nothing" in caplog.text


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}, ((0.6, 20, 0.95), 1.0)),
        ({"general.sampling.penalty_repeat": 1.1, "general.sampling.min_p": 0.05}, ((1.0, 0, 1.0), 1.1)),
        ({"general.sampling.penalty_repeat": 1.1, "general.sampling.penalty_last_n": 0}, ((1.0, 0, 1.0), 1.0)),
        ({"general.sampling.penalty_last_n": 64, "general.sampling.mirostat": 0}, ((1.0, 0, 1.0), 1.0)),
        ({"general.sampling.mirostat": 2}, "general.sampling.mirostat is not supported; got 2"),
        ({"general.sampling.xtc_probability": 0.5}, "general.sampling.xtc_probability is not supported"),
        ({"general.sampling.sequence": "top_k;temperature"}, "general.sampling.sequence is not supported"),
        ({"general.sampling.temp": "hot"}, "temperature must be a number"),
        ({"tokenizer.ggml.suppress_tokens": "x"}, "suppress_tokens must be a list"),
    ],
)
def test_a_gguf_file_says_the_same_in_its_metadata(said, found, tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(make("qwen3-tied", tmp_path), file, metadata=said)
    if isinstance(found, str):
        assert read_defaults(file, "none") == NO_DEFAULTS
        with pytest.raises(CheckpointError, match=rf"m\.gguf: its metadata as a generation_config\.json: {found}"):
            read_defaults(file)
        return
    values = read_defaults(file).values()
    assert ((values["temperature"], values["top_k"], values["top_p"]), values["repetition_penalty"]) == found


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000], ids=lambda content: repr(content[:4]))
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "generation_config.json").write_bytes(content)
    for read in (read_defaults, stop_tokens):
        with pytest.raises(CheckpointError, match=r"generation_config\.json (cannot be read as JSON|must hold a JSON object)"):
            read(tmp_path)


@pytest.mark.parametrize("value", ["</s>", True, [2, "x"], [[2]], 2.0, {}], ids=repr)
def test_a_bad_end_token_is_named_with_its_file(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be a token id"):
        stop_tokens(write(tmp_path, eos_token_id=value))
