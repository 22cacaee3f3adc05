"""Our decoder against `transformers`, family by family; and the config.json of models that cannot be served."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import load_decoder, read_config, save
from attend.model.net.families.family import POSITIONS as POSITIONS_OF
from attend.model.net.families.positions import KEYS, tell
from attend.model.net.families.table import FAMILIES
from attend.model.net.families.unsupported_families import STRANGERS
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row
from attend.model.net.rope import rotary_table
from attend.model.net.transformer import Decoder
from attend.model.train.loss import hidden_states
from tests.model.attention import BACKENDS
from tests.model.checkpoints import (
    KINDS,
    POSITIONS,
    edit_config,
    their_logits,
    their_model,
    tiny_config,
    tiny_decoder,
    write_checkpoint,
)

PROMPT = [5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 12]
STEPS = 64


SLIDING = {
    "mistral-sliding": {"sliding_window": 7},
    "qwen2-sliding-above": {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ...},
    "qwen3-sliding-below": {
        "sliding_window": 9,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Changes to the config.json of a kind of checkpoint; each window is shorter than PROMPT."""


@pytest.fixture(scope="module", params=[*KINDS, *SLIDING])
def folder(request, tmp_path_factory) -> Path:
    changes = SLIDING.get(request.param, {})
    kind = request.param.split("-")[0] if changes else request.param
    folder = write_checkpoint(kind, tmp_path_factory.mktemp(request.param))
    edit_config(folder, **changes)
    return folder


@pytest.fixture(scope="module")
def net(folder) -> Decoder:
    return load_decoder(folder, torch.float32, "cpu")


@pytest.fixture(scope="module")
def theirs(folder) -> torch.nn.Module:
    return their_model(folder)


@torch.inference_mode()
def generate(net: Decoder, backend: str, steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after PROMPT through a paged cache, and the logits [steps, V] they were taken from."""
    cache = KVCache.allocate(net.config, 12, 8, torch.float32, "cpu")
    blocks, attention = [7, 2, 11, 4, 9, 1, 12, 5, 3, 10, 8, 6], BACKENDS[backend](net.config.attention_variants)
    text, scores, new = [], [], PROMPT
    for _ in range(steps):
        layout = BatchLayout.build([Row(blocks, len(text), len(new))], 8, "cpu", states=[2])
        hidden = net(torch.tensor(new), layout.positions_T, PagedAttention(attention, cache, layout))
        scores.append(net.logits(hidden[-1]))
        text, new = text + new, [int(scores[-1].argmax())]
    return text[len(PROMPT) :] + new, torch.stack(scores)


def rounding(net: Decoder, expected: torch.Tensor) -> float:
    """1e-4. A delta rule's heads are normed however small their outputs are: there both sides are up to 2e-4 from float64."""
    return 1e-4 if net.config.delta is None else 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_and_logits_are_those_of_transformers(net, theirs, backend):
    """64 steps through the paged cache take the tokens that transformers takes, on logits that are its own but for rounding."""
    tokens, ours = generate(net, backend, STEPS)
    expected = their_logits(theirs, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(ours, expected, atol=rounding(net, expected), rtol=0)
    assert expected.argmax(-1).tolist() == tokens
    assert expected.std() > 0.5


def test_a_dense_pass_is_that_of_transformers(net, theirs):
    tokens = (PROMPT * 8)[:60]
    ours = net.logits(hidden_states(net, torch.tensor([tokens])))
    expected = their_logits(theirs, tokens)
    torch.testing.assert_close(ours, expected, atol=rounding(net, expected), rtol=0)


def test_a_loaded_model_is_at_rest(net):
    """Nothing trains it, and everything is in the dtype that was asked for."""
    assert not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert {torch.float32} == {parameter.dtype for parameter in net.parameters()}


def test_a_tied_head_is_the_embedding(net):
    same = net.head.weight.data_ptr() == net.embedding.tokens.weight.data_ptr()
    assert same == net.config.tied_head


@pytest.fixture
def llama(tmp_path) -> Path:
    return write_checkpoint("llama", tmp_path)


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return write_checkpoint("gpt2", tmp_path)


def assert_refused(folder: Path, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        read_config(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("kind", ["marmot", "", None, 5])
def test_an_unknown_family_is_refused_by_name(llama, kind):
    edit_config(llama, model_type=kind)
    assert_refused(llama, f"model_type.*{kind!r}.*known: .*llama")


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_known_stranger_is_refused_with_the_nearest_that_is_served_and_what_differs(llama, kind):
    edit_config(llama, model_type=kind)
    nearest, differs = STRANGERS[kind]
    assert nearest in FAMILIES or nearest is None
    said = "no similar model_type is supported" if nearest is None else f"the nearest supported model_type is {nearest}"
    assert_refused(llama, f"model_type {kind!r} is not supported {re.escape(f'({differs}; {said})')}; known: .*llama")


def test_strangers_are_models_that_there_are_and_that_are_not_served():
    assert set(STRANGERS) <= set(CONFIG_MAPPING) - set(FAMILIES)
    asked = "deepseek_v32 lfm3_vl mamba falcon bloom gemma3n llama4 t5"
    assert set(asked.split()) <= set(STRANGERS)


REFUSED = {
    "axial": {"rope_scaling": {"rope_type": "axial", "factor": 4.0}},
    "full_attention": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
    "partial_rotary_factor inside": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "factor": {
        "rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 0}
        | {"original_max_position_embeddings": 32}
    },
    "rope_type": {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
    "rope_type of old": {"rope_parameters": ..., "rope_scaling": {"type": "su", "factor": 2.0}},
    "short_factors must be 4 numbers": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 2.0, 2.0, 2.0]}
        | {"original_max_position_embeddings": 32}
    },
    "rope_theta above 1": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 0.5}},
    "(hidden_act|activation).*mish": {"hidden_act": "mish"},
    "quantization_config": {"quantization_config": {"quant_method": "hqq"}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "extrapolation_factor": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "extrapolation_factor": 0.5}},
    "num_key_value_heads|key/value heads": {"num_key_value_heads": 3},
    "num_attention_heads": {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": ...},
    "head_dim|head size": {"head_dim": 7},
    "token.* 96": {"eos_token_id": 96},
    "token.* -1": {"bos_token_id": -1},
}


@pytest.mark.parametrize(("named", "changes"), REFUSED.items(), ids=REFUSED)
def test_arithmetic_that_is_not_built_is_refused_by_key(llama, named, changes):
    edit_config(llama, **changes)
    assert_refused(llama, named.removesuffix(" of old").removesuffix(" inside"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Any]:
    folder = write_checkpoint("llama", tmp_path_factory.mktemp("plain"))
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in raw.items() if not key.startswith("rope")}


ODD_ROPES: dict[str, dict[str, Any]] = {
    "yarn without the positions that it learned": {"rope_type": "yarn", "factor": 4.0},
    "yarn without a factor": {"type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    "yarn that says that it was tuned": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "finetuned": True,
    },
    "yarn with bounds of 0": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
    "llama3 without the positions": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope without them": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2, 3, 9.5]},
    "linear with them": {"rope_type": "linear", "factor": 3.0, "original_max_position_embeddings": 32},
    "dynamic with them": {"type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 32, "finetuned": False},
    "default with a factor": {"rope_type": "default", "factor": 3.0, "attention_factor": 1.5, "beta_fast": 3},
    "linear with an attn_factor": {"rope_type": "linear", "factor": 2.0, "attn_factor": 0.9},
    "default with sections": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    "yarn with two factors": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1, "attn_factor": 0.9},
    "yarn with positions of a float": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32.0},
    "longrope with scales": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2, 3, 9.5],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    },
    "a type in both spellings": {"rope_type": "linear", "type": "dynamic", "factor": 3.0},
}


@pytest.mark.parametrize("beside", [{}, {"rope_theta": 700.0}, {"original_max_position_embeddings": 64}], ids=str)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("values", ODD_ROPES.values(), ids=ODD_ROPES)
def test_keys_that_are_absent_and_keys_without_effect_are_as_transformers_has_them(plain, caplog, values, name, beside):
    raw = plain | beside | {name: values}
    tell.cache_clear()
    with caplog.at_level("INFO", "attend.model"):
        ours = FAMILIES["llama"].read(raw)
        FAMILIES["llama"].read(raw)
    kind = values.get("rope_type", values.get("type"))
    twice = {"attn_factor"} if "attention_factor" in values else set()
    idle = sorted(values.keys() - {"rope_type", "type", *KEYS[kind]} | values.keys() & twice)
    said = [f"config.json: {name} has {', '.join(idle)}, which rope_type {kind!r} does not use: ignored"] if idle else []
    assert [record.getMessage() for record in caplog.records] == said
    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**copy.deepcopy(raw)))
    theirs = rotary(torch.zeros(1), torch.arange(2 * POSITIONS)[None])
    for mine, table in zip(rotary_table(ours.ropes[0], 2 * POSITIONS), theirs, strict=True):
        torch.testing.assert_close(mine, table[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("scales", [{}, {"mscale": 0.7, "mscale_all_dim": 1.2}], ids=["plain", "scales"])
def test_the_attn_factor_of_yarn_comes_on_top_of_what_its_factor_makes(plain, scales):
    """DeepSeek-R1-0528-Qwen3-8B has one that undoes the other, to 1.0."""
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **scales}
    with_it = FAMILIES["qwen3"].read(
        plain | {"model_type": "qwen3", "rope_scaling": values | {"attn_factor": 0.8782488562869419}}
    )
    without = FAMILIES["qwen3"].read(plain | {"model_type": "qwen3", "rope_scaling": values})
    wanted = without.rope_scaling.attention_factor * 0.8782488562869419
    assert wanted == pytest.approx(1.0 if not scales else wanted)
    for mine, table in zip(*(rotary_table(config.ropes[0], 2 * POSITIONS) for config in (with_it, without)), strict=True):
        torch.testing.assert_close(mine, table * 0.8782488562869419, atol=1e-6, rtol=0)


def test_a_config_that_does_not_say_has_the_positions_that_transformers_gives_it():
    assert POSITIONS_OF.keys() == FAMILIES.keys() - {"attend", "gpt2"}, "POSITIONS of net/families/family.py has each family"
    for kind, positions in POSITIONS_OF.items():
        config = CONFIG_MAPPING[kind]()
        assert positions == config.get_text_config().max_position_embeddings


LLAMA_KEYS = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]


@pytest.mark.parametrize("key", LLAMA_KEYS)
def test_a_missing_key_is_named(llama, key):
    edit_config(llama, **{key: ...})
    assert_refused(llama, key)


WRONG_TYPES = {
    **dict.fromkeys(LLAMA_KEYS, "many"),
    "max_position_embeddings": [128],
    "num_key_value_heads": "2",
    "head_dim": 8.5,
    "rms_norm_eps": "small",
    "hidden_act": ["silu"],
    "rope_parameters": [1, 2],
    "rope_theta": "large",
    "tie_word_embeddings": "false",
    "bos_token_id": "<s>",
    "eos_token_id": {"id": 2},
}


@pytest.mark.parametrize(("key", "value"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_named(llama, key, value):
    changes = {key: value}
    edit_config(llama, **(changes | {"rope_parameters": ...} if key == "rope_theta" else changes))
    assert_refused(llama, key)


@pytest.mark.parametrize("changes", [{"n_head": 5}, {"scale_attn_weights": False}, {"activation_function": "mish"}], ids=str)
def test_a_gpt2_that_is_not_built_is_refused_by_key(gpt2, changes):
    edit_config(gpt2, **changes)
    assert_refused(gpt2, "mish" if "activation_function" in changes else next(iter(changes)))


ATTEND_VALUES = {
    "norm": "batchnorm",
    "norm_eps": "small",
    "gated_mlp": "yes",
    "rope_scaling": {"factor": 2.0},
    "num_layers": 2.0,
    "eos_token_ids": 2,
    "sliding_window": 0,
    "window_layers": [2],
    "embedding_scale": 0,
    "experts_per_token": 0,
    "routing": "some",
    "routing_eps": -1e-6,
    "latent": {"rank": 4, "query_rank": 0, "key_size": 8, "rope_size": 4, "value_size": 8},
    "kv_shared_layers": 2,
    "per_layer_vocab_size": True,
    "delta": {"key_heads": 1, "value_heads": 2, "key_size": 8, "value_size": 8, "kernel": 0},
    "delta_layers": [2],
    "rope_thetas": [1.0],
    "query_scale_length": 2.5,
}


@pytest.mark.parametrize(("key", "value"), ATTEND_VALUES.items(), ids=ATTEND_VALUES)
def test_a_bad_value_in_our_own_spelling_is_named(tmp_path, key, value):
    save(tiny_decoder(tiny_config()), tmp_path, torch.float32)
    edit_config(tmp_path, **{key: value})
    assert_refused(tmp_path, key)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", ...), ("colour", "red")])
def test_our_own_spelling_is_read_strictly(tmp_path, key, value):
    """A key that is missing, and one that is not known, is named."""
    save(tiny_decoder(tiny_config()), tmp_path, torch.float32)
    edit_config(tmp_path, **{key: value})
    assert_refused(tmp_path, key)


BAD_WINDOWS = [
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
    ("qwen2", {"max_window_layers": -1, "layer_types": ...}, "max_window_layers"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False}, "layer_types"),
]


@pytest.mark.parametrize(("kind", "changes", "named"), BAD_WINDOWS, ids=str)
def test_a_window_that_is_not_understood_is_named(tmp_path, kind, changes, named):
    folder = write_checkpoint(kind, tmp_path)
    edit_config(folder, **{"sliding_window": 9, "use_sliding_window": True} | changes)
    assert_refused(folder, named)


@pytest.mark.parametrize(
    ("ours", "chat", "merged"),
    [(2, [7, 2, 9], (2, 7, 9)), ([2, 3], 4, (2, 3, 4)), (2, ..., (2,)), (..., 5, (5,)), (None, None, ())],
)
def test_stop_tokens_of_the_generation_config_are_added(llama, ours, chat, merged):
    """Chat models name their end-of-turn tokens only in generation_config.json; each stops once."""
    edit_config(llama, eos_token_id=ours)
    edit_config(llama, "generation_config.json", eos_token_id=chat)
    assert merged == read_config(llama).eos_token_ids


@pytest.mark.parametrize("value", [96, "</s>", [[2]]], ids=repr)
def test_a_bad_stop_token_of_the_generation_config_is_refused(llama, value):
    edit_config(llama, "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(llama)


def test_a_folder_without_generation_config_is_complete(llama):
    (llama / "generation_config.json").unlink()
    assert read_config(llama).eos_token_ids == (2,)
