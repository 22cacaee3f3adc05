"""Each family is compared with a checkpoint of its own, and has a name that people know."""

import pytest
import torch

from attend.model.engine.choice import choose_backend
from attend.model.net.families.table import FAMILIES, TITLES
from tests.docs import compared


def test_a_family_is_compared_unless_its_spelling_is_our_own():
    assert set(FAMILIES) - {"attend"} == set(compared())


def test_every_checkpoint_is_computed_by_triton_on_a_gpu():
    pytest.importorskip("triton")
    for kind, known in compared().items():
        for each in known:
            assert (kind, choose_backend("auto", each, torch.bfloat16, "cuda", 32).name) == (kind, "triton")


def test_every_family_has_a_title():
    assert TITLES.keys() == FAMILIES.keys()
