"""Each family is compared with a checkpoint of its own."""

import json

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.net.families.table import FAMILIES
from attend.model.net.features import NATIVE, TRITON, features
from tests.docs import compared
from tests.model.checkpoints import KINDS, TORCH_ALONE


def test_a_family_is_compared_unless_its_spelling_is_our_own():
    assert set(FAMILIES) - {"attend"} == set(compared())


def test_every_checkpoint_is_computed_by_triton_on_a_gpu():
    pytest.importorskip("triton")
    for kind, known in compared().items():
        for each in known:
            backend = "torch" if each.latent is not None else "triton"
            assert (kind, choose_backend("auto", each, Placement(torch.bfloat16, "cuda", 32)).name) == (kind, backend)


def test_the_checkpoints_that_torch_alone_computes_are_those_that_ask_for_more():
    raws = {kind: json.loads(make().config.to_json_string(use_diff=False)) for kind, make in KINDS.items()}
    asked = {kind: features(FAMILIES[raw["model_type"]].read(raw)) for kind, raw in raws.items()}
    assert TORCH_ALONE == {kind for kind, needs in asked.items() if not needs <= NATIVE}
    assert TORCH_ALONE == {kind for kind, needs in asked.items() if not needs <= TRITON}
