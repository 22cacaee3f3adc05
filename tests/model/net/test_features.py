"""A model is computed only by those who know all that it asks for."""

from dataclasses import fields
from typing import get_args

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import BACKENDS
from attend.model.config import CHOICES as NAMED
from attend.model.config import ModelConfig
from attend.model.net import features as table
from attend.model.net.features import ALL, ATTENTION, CHOICES, NATIVE, SIZES, SWITCHES, TRITON, features
from attend.model.rope import Llama3Scaling
from attend.model.sublayers import DeltaSpec, LatentSpec
from tests.model.checkpoints import tiny_config

FAMILY_OF_ALL = {name: get_args(kind) for name, kind in NAMED.items()} | {"gated_mlp": (True, False)}
KINDS = {name: kind for name, kind in BACKENDS.items() if name != "triton" or kind.absence() is None}


def serves(kind: str, config: ModelConfig) -> bool:
    return KINDS[kind].refusal(config, Placement(torch.bfloat16, "cuda" if kind == "triton" else "cpu", 32)) is None


def test_every_field_of_a_model_stands_in_one_table():
    """A field that is new stands in none, until somebody says who computes it."""
    assert sorted(field.name for field in fields(ModelConfig)) == sorted([*SIZES, *CHOICES, *SWITCHES])


def test_every_feature_that_there_is_has_somebody_who_computes_it():
    chosen = {f"{name}={value}" for name in CHOICES for value in FAMILY_OF_ALL[name]}
    assert chosen | set(SWITCHES.values()) == ALL
    assert ATTENTION < NATIVE <= ALL
    assert ATTENTION < TRITON <= ALL


ON = {
    "embedding_scale": 2.0,
    "residual_scale": 0.5,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rope_size": 4,
    "rope_scaling": Llama3Scaling(2.0, 1.0, 4.0, 32),
    "local_rope_theta": 100.0,
    "rope_layers": (0,),
    "sliding_window": 7,
    "softcap": 5.0,
    "attention_scale": 0.5,
    "sinks": True,
    "swiglu_limit": 7.0,
    "swiglu_slope": 1.0,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 16,
    "expert_layers": (0,),
    "routing": "chosen",
    "shared_expert_size": 16,
    "shared_expert_gate": False,
    "scoring_func": "sigmoid",
    "score_correction": True,
    "expert_groups": 2,
    "groups_per_token": 2,
    "group_top": 1,
    "routing_eps": 1e-6,
    "routing_floor": 1e-6,
    "routed_scaling_factor": 2.5,
    "attention_gate": True,
    "latent": LatentSpec(rank=4, query_rank=None, key_size=8, rope_size=4, value_size=8),
    "rope_thetas": (100.0, 1e4),
    "query_scale_beta": 0.1,
    "query_scale_length": 64,
    "qk_norm_after_rope": True,
    "post_norm_eps": 1e-8,
    "global_head_size": 16,
    "global_kv_heads": 1,
    "keys_are_values": True,
    "value_norm": True,
    "kv_shared_layers": 1,
    "kv_shared_mlp_size": 16,
    "layer_scale": True,
    "per_layer_input_size": 8,
    "per_layer_vocab_size": 100,
    "experts_beside_mlp": True,
    "delta": DeltaSpec(key_heads=1, value_heads=2, key_size=8, value_size=8, kernel=4),
    "delta_norm_place": "output",
    "head_gate": True,
    "conv_kernel": 3,
    "conv_bias": True,
}


@pytest.mark.parametrize(("name", "value"), ON.items(), ids=ON)
def test_a_switch_asks_for_its_feature_and_for_no_other(name, value):
    one_head = {"num_kv_heads": 1} if name == "latent" else {}
    asked = features(tiny_config(**{name: value}, **one_head)) - features(tiny_config())
    assert asked == {SWITCHES[name]}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_feature_that_nobody_computes_yet_is_refused_by_every_backend(monkeypatch, kind):
    config = tiny_config(embedding_scale=2.0)
    assert serves(kind, config)
    monkeypatch.setitem(SWITCHES, "embedding_scale", "made_up")
    assert not serves(kind, config)
    assert ALL is not NATIVE and ALL is not TRITON  # so that a name that is new in ALL is not theirs too


def test_all_switches_are_tried():
    alone = {"window_layers", "delta_layers", "conv_layers", "local_rope_scaling"}  # which say nothing alone
    assert set(ON) == set(SWITCHES) - alone


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_computes_a_feature_that_he_does_not_list(kind, monkeypatch):
    """As if a family had brought a switch that a table names and no backend has heard of."""
    config = tiny_config(head_size=32, rope_theta=5.0)
    assert serves(kind, config)
    monkeypatch.setattr(table, "SWITCHES", SWITCHES | {"rope_theta": "brand new"})
    assert not serves(kind, config)
