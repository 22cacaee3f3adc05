"""generation_config.json: its end tokens always count, its defaults of sampling where asked for, its mistakes are named."""

import json
from pathlib import Path

import pytest

from attend.model.errors import CheckpointError
from attend.model.generation_config import NO_DEFAULTS, read_defaults, stop_tokens
from attend.model.params import DecodingParams, SamplingParams


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


def test_nothing_is_read_where_the_file_is_not_asked_for(tmp_path):
    assert read_defaults(write(tmp_path, **ALL), "none") == NO_DEFAULTS
    assert read_defaults(write(tmp_path, temperature="hot", num_beams=4), "none") == NO_DEFAULTS


def test_a_file_that_does_not_sample_is_greedy(tmp_path):
    assert read_defaults(write(tmp_path, do_sample=False, temperature=0.7)).values() == PLAIN | {"temperature": 0.0}


BAD = [
    *[(name, value) for name in ALL for value in ("1", [], True, -2, float("nan"))],
    *(("temperature", 2.5), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.5), ("min_p", 2), ("repetition_penalty", 0)),
    *(("do_sample", 1), ("do_sample", "false"), ("num_beams", 4), ("no_repeat_ngram_size", 3), ("typical_p", 0.9)),
    *(("suppress_tokens", [1]), ("forced_eos_token_id", 2), ("min_new_tokens", 5), ("sequence_bias", [[[1], 2.0]])),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_value_or_one_that_is_not_carried_out_stops_the_start_with_file_and_field(name, value, tmp_path):
    folder = write(tmp_path, **{name: value})
    with pytest.raises(CheckpointError) as caught:
        read_defaults(folder)
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: {name} ")


def test_values_that_change_nothing_are_fine(tmp_path):
    off = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "forced_eos_token_id": None}
    assert read_defaults(write(tmp_path, **off)) == NO_DEFAULTS


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000], ids=lambda content: repr(content[:4]))
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "generation_config.json").write_bytes(content)
    for read in (read_defaults, stop_tokens):
        with pytest.raises(CheckpointError, match=r"generation_config\.json (cannot be read as JSON|must hold a JSON object)"):
            read(tmp_path)


@pytest.mark.parametrize(("value", "ends"), [(None, ()), (2, (2,)), ([2, 7], (2, 7)), ([], ())])
def test_the_end_tokens_are_one_or_several(value, ends, tmp_path):
    assert stop_tokens(tmp_path) == ()
    assert stop_tokens(write(tmp_path, eos_token_id=value)) == ends


@pytest.mark.parametrize("value", ["</s>", True, [2, "x"], [[2]], 2.0, {}], ids=repr)
def test_a_bad_end_token_is_named_with_its_file(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be a token id"):
        stop_tokens(write(tmp_path, eos_token_id=value))
