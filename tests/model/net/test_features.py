"""A model is computed only by those who know all that it asks for."""

from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import BACKENDS
from attend.model.config import ModelConfig
from attend.model.net import features as table
from attend.model.net.features import ALL, ATTENTION, CHOICES, NATIVE, SIZES, SWITCHES, TRITON
from tests.model.checkpoints import tiny_config

NAMED = {field.name: get_args(field.type) for field in fields(ModelConfig) if get_origin(field.type) is Literal}
FAMILY_OF_ALL = NAMED | {"gated_mlp": (True, False)}
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


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_feature_that_nobody_computes_yet_is_refused_by_every_backend(monkeypatch, kind):
    config = tiny_config(embedding_scale=2.0)
    assert serves(kind, config)
    monkeypatch.setitem(SWITCHES, "embedding_scale", "made_up")
    assert not serves(kind, config)
    assert ALL is not NATIVE and ALL is not TRITON  # so that a name that is new in ALL is not theirs too


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_computes_a_feature_that_he_does_not_list(kind, monkeypatch):
    """As if a family had brought a switch that a table names and no backend has heard of."""
    config = tiny_config(head_size=32, rope_theta=5.0)
    assert serves(kind, config)
    monkeypatch.setattr(table, "SWITCHES", SWITCHES | {"rope_theta": "brand new"})
    assert not serves(kind, config)
