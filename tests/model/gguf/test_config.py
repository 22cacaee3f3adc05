"""Metadata of a GGUF file that are missing, of the wrong type, or not carried out: refused by their key."""

import math
import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError, SettingError
from attend.model.generation_config import read_defaults
from attend.model.gguf import documents
from attend.model.gguf.config import ARCHITECTURES
from attend.model.gguf.container import read_container
from attend.model.gguf.paths import only_gguf
from attend.model.net.checkpoint import read_config
from attend.model.text.tokenizer import Tokenizer
from tests.model.gguf_files import MADE, architecture, make, write_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The checkpoint folder of a kind."""
    folders: dict[str, Path] = {}

    def one(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = make(kind, tmp_path_factory.mktemp(kind))
        return folders[kind]

    return one


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_config(path)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value).removeprefix(f"{path}: ")


SAME = [kind for kind in MADE if kind not in ("llama3-rope", "phi3-long", "mistral", "hunyuan_v1_dense-alpha")]


@pytest.mark.parametrize("kind", SAME)
def test_a_config_is_that_of_the_checkpoint_to_the_last_digit(kind, made, tmp_path):
    """But for ropes whose factors lie in tensors, and for the end tokens, which GGUF has one by one."""
    path = write_gguf(made(kind), tmp_path / "tiny.gguf")
    ours, theirs = read_config(path), read_config(made(kind))
    for name in ModelConfig.__dataclass_fields__.keys() - {"bos_token_id", "eos_token_ids"}:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_every_architecture_that_is_read_is_compared():
    assert ARCHITECTURES.keys() <= {architecture({"model_type": kind.partition("-")[0]}) for kind in MADE}


NEEDED = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]


@pytest.mark.parametrize("key", [*NEEDED, "attention.layer_norm_rms_epsilon"])
def test_a_key_that_is_missing_is_named(key, made, tmp_path):
    path = write_gguf(made("llama"), tmp_path / "tiny.gguf", drop=(f"llama.{key}",))
    assert refusal(path).startswith(f"llama.{key} must be a ")


REFUSED = {
    "general.architecture": ("falcon", "general.architecture 'falcon' is not read from GGUF; known: arcee, cohere2"),
    "general.type": ("adapter", "it holds no model by itself: its general.type is 'adapter'"),
    "llama.attention.causal": (False, "llama.attention.causal = False is not supported"),
    "llama.attention.clamp_kqv": (8.0, "llama.attention.clamp_kqv = 8.0 is not supported"),
    "llama.attention.value_length": (16, "llama.attention.value_length 16 differs from key_length 8: not supported"),
    "llama.rope.scaling.type": ("odd", "llama.rope.scaling.type 'odd' is not supported; known: none, linear, longrope, yarn"),
    "llama.pooling_type": (7, "llama.pooling_type = 7 is not supported"),
    "llama.brand_new": (1, "llama.brand_new is an unknown key, which may change what the model computes"),
    "llama.rope.freq_base": ("x", "llama.rope.freq_base must be a number; got 'x'"),
    "llama.rope.dimension_count": (4, "its metadata as a config.json: config.json: partial_rotary_factor"),
}


@pytest.mark.parametrize("key", list(REFUSED))
def test_what_is_not_carried_out_is_refused_by_its_key(key, made, tmp_path):
    value, sentence = REFUSED[key]
    if key == "general.architecture":
        path = write_gguf(made("llama"), tmp_path / "tiny.gguf")
        path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\6\0\0\0\0\0\0\0falcon", 1))
    else:
        path = write_gguf(made("llama"), tmp_path / "tiny.gguf", metadata={key: value})
    assert refusal(path).startswith(sentence)


WRONG_TYPES = ["two", True, 0, -1, 1.5, math.nan, math.inf, 2**40, 2**63, [], ["a"], [1, 2]]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_each_key_of_a_wrong_type_is_refused_with_a_sentence_or_passed_over(kind, made, tmp_path, monkeypatch):
    path = write_gguf(made(kind), tmp_path / "tiny.gguf")
    found = read_container(path)
    keys = found.metadata.keys() | {"general.type", "general.architecture", "tokenizer.chat_template", "general.sampling.temp"}
    for key, value in product(sorted(keys), WRONG_TYPES):
        changed = replace(found, metadata=found.metadata | {key: value})
        monkeypatch.setattr(documents, "read_container", lambda path, changed=changed: changed)
        documents._container.cache_clear()
        documents._document.cache_clear()
        for read in (read_config, documents.tokenizer_of, read_defaults):
            with suppress(CheckpointError, SettingError):
                read(path)


@pytest.mark.parametrize(
    ("value", "sentence"), [("clip", "it holds what a model sees images with"), ("bert", "general.architecture 'bert'")]
)
def test_what_is_no_model_of_text_is_refused_before_its_vocabulary_is_read(value, sentence, made, tmp_path, monkeypatch):
    path = write_gguf(made("llama"), tmp_path / "tiny.gguf", drop=("tokenizer.ggml.tokens",))
    found = read_container(path)
    changed = replace(found, metadata=found.metadata | {"general.architecture": value})
    monkeypatch.setattr(documents, "read_container", lambda path: changed)
    assert refusal(path).startswith(sentence)
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        Tokenizer.load(path)


GEMMA4 = {
    "feed_forward_length": ([48, 48, 48, 48, 96, 50], "gemma4.feed_forward_length [48, 48, 48, 48, 96, 50] differs from layer"),
    "attention.head_count_kv": ([2, 1], "gemma4.attention.head_count_kv and sliding_window_pattern must have 6 values"),
    "rope.scaling.type": ("yarn", "tensor rope_freqs.weight beside gemma4.rope.scaling.type is not supported"),
}


@pytest.mark.parametrize("key", GEMMA4)
def test_sizes_of_layers_that_no_model_has_are_refused(key, made, tmp_path):
    value, sentence = GEMMA4[key]
    path = write_gguf(made("gemma4_text-shared"), tmp_path / "tiny.gguf", metadata={f"gemma4.{key}": value})
    assert refusal(path).startswith(sentence)


ROUTED = [
    ("deepseek_v3", {"deepseek2.expert_gating_func": 3}, "deepseek2.expert_gating_func = 3 is not supported"),
    (
        "deepseek_v3",
        {"deepseek2.attention.key_length_mla": None},
        "deepseek2.attention.key_length_mla is missing: convert the model with a newer llama.cpp",
    ),
    (
        "deepseek_v2",
        {"deepseek2.rope.scaling.yarn_log_multiplier": None},
        "deepseek2.rope.scaling.yarn_log_multiplier must be a number; got None",
    ),
    ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "glm4moe.expert_gating_func = 1 is not supported"),
    ("ernie4_5_moe", {"ernie4_5-moe.expert_gating_func": 2}, "ernie4_5-moe.expert_gating_func = 2 is not supported"),
    ("minimax_m2", {"minimax-m2.expert_gating_func": 1}, "minimax-m2.expert_gating_func = 1 is not supported"),
    ("minimax_m2", {"minimax-m2.expert_weights_scale": 2.0}, "minimax-m2.expert_weights_scale = 2.0 is not supported"),
    ("olmoe", {"olmoe.expert_weights_norm": True}, "olmoe.expert_weights_norm = True is not supported"),
    ("qwen3_moe", {"qwen3moe.expert_group_count": 2}, "qwen3moe.expert_group_count = 2 is not supported"),
    (
        "granitemoehybrid",
        {"granitehybrid.attention.head_count_kv": [2, 0, 0, 2]},
        "granitehybrid.attention.head_count_kv differs from layer to layer, which is not supported",
    ),
]


@pytest.mark.parametrize(("kind", "metadata", "named"), ROUTED, ids=str)
def test_a_router_that_is_not_the_architectures_is_refused(kind, metadata, named, made, tmp_path):
    assert refusal(write_gguf(made(kind), tmp_path / "tiny.gguf", metadata=metadata)) == named


def test_only_a_folder_with_one_gguf_and_no_safetensors_stands_for_it(tmp_path):
    assert only_gguf(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    (tmp_path / "mmproj-a.gguf").touch()
    assert only_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b-00001-of-00002.gguf").touch()
    assert only_gguf(tmp_path) is None
    (tmp_path / "a.gguf").unlink()
    (tmp_path / "b-00002-of-00002.gguf").touch()
    assert only_gguf(tmp_path) == tmp_path / "b-00001-of-00002.gguf"
    (tmp_path / "model.safetensors").touch()
    assert only_gguf(tmp_path) is None


def test_a_folder_of_several_gguf_files_is_refused_with_the_way_to_name_one(tmp_path):
    for name in ("b.gguf", "a b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path)
    assert str(error.value).endswith(f"config.json is missing; name one of its GGUF files, as in '{tmp_path}/a b.gguf'")
