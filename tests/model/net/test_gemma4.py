"""What Gemma 4's checkpoints bring beside a text model, the spellings that they have, and what of them is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from attend.model.explain.reference import reference
from attend.model.net.checkpoint import inspect, load_decoder, read_config
from attend.model.net.formats.codes import INT8
from attend.model.net.kv_cache import KVCache
from attend.model.net.quantised import QuantisedLinear
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import edit_config, edit_tensors, write_checkpoint
from tests.model.net.test_qwen3_5 import same

TOKENS = [5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("gemma4", tmp_path)


@pytest.fixture
def shared(tmp_path) -> Path:
    return write_checkpoint("gemma4_text-shared", tmp_path)


def raw_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_models_of_images_and_sound_are_left_out_and_one_line_says_so(folder, caplog):
    edit_tensors(folder, model__audio_tower__output_proj__weight=torch.zeros(2, 2))
    with caplog.at_level(logging.INFO, "attend.model"):
        load_decoder(folder, torch.float32, "cpu")
    left = "model.vision_tower.*, model.embed_vision.*, model.audio_tower.*"
    assert [record.getMessage() for record in caplog.records] == [
        f"the tensors {left} are left out: images, videos and sound are not served"
    ]
    inspect(folder)


def test_layers_that_share_keys_and_values_may_bring_some_of_their_own(shared):
    """As published files do: they are not read."""
    wanted, name = load_decoder(shared, torch.float32, "cpu"), "model__layers__5__self_attn"
    edit_tensors(shared, **{f"{name}__k_proj__weight": torch.zeros(16, 32), f"{name}__k_norm__weight": torch.zeros(16)})
    assert same(wanted, load_decoder(shared, torch.float32, "cpu"))


def test_layers_that_share_keys_and_values_take_no_memory_for_them(shared):
    config = read_config(shared)
    alone = load_decoder(shared, torch.float32, "cpu")
    assert [layer.kv_layer for layer in config.layers] == [None, None, None, None, 2, 3]
    token = 2 * 2 * (2 * 8 + 1 * 16)  # in two layers keys and values of two heads of 8, in two of one of 16
    assert config.kv_bytes_per_token(1) == token + 2 * 2 * (2 * 2 + 2)
    assert config.kv_bytes_per_token(4) == 4 * token
    cache = KVCache.allocate(alone.config, 3, 8, torch.float32, "cpu")
    assert cache.nbytes == 4 * 8 * 4 * token
    assert cache.keys[4].data_ptr() == cache.keys[2].data_ptr() and cache.values[5].data_ptr() == cache.values[3].data_ptr()


def test_published_keys_are_those_that_transformers_writes(shared):
    """It writes what single layers have; published files name the heads of layers without a window."""
    expected = read_config(shared)
    assert (expected.head_size, expected.global_head_size, expected.global_kv_heads) == (8, 16, 1)
    published = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    edit_config(shared, per_layer_config=..., **published)
    assert read_config(shared) == expected
    edit_config(shared, attention_k_eq_v=False)
    assert read_config(shared).global_kv_heads is None


def test_the_last_layer_has_no_window_whatever_its_type(shared):
    expected = read_config(shared)
    edit_config(shared, layer_types=[*["sliding_attention", "full_attention"] * 2, "sliding_attention", "sliding_attention"])
    assert read_config(shared) == expected


@pytest.mark.parametrize(("tied", "expected"), [(False, False), (True, True), (..., True)])
def test_beside_images_the_outer_config_says_whether_the_head_is_tied(folder, tied, expected):
    edit_config(folder, tie_word_embeddings=tied, text_config=raw_of(folder)["text_config"] | {"tie_word_embeddings": False})
    assert read_config(folder).tied_head == expected


@torch.inference_mode()
def test_the_table_of_the_layers_may_be_in_8_bits(shared):
    """Beside the other matrices; the explorer reads it as it is kept."""
    plain, net = load_decoder(shared, torch.float32, "cpu"), load_decoder(shared, torch.float32, "cpu", quantize=INT8)
    table = net.per_layer.tokens
    assert isinstance(table, QuantisedLinear)
    assert (table.dense() - plain.per_layer.tokens.weight).abs().max() <= plain.per_layer.tokens.weight.abs().max() / 127
    wanted, found = (hidden_states(each, torch.tensor([TOKENS])) for each in (net, reference(net)))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
