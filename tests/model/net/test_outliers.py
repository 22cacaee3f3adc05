"""Outliers make some numbers between matrices large, and change no logit."""

import pytest
import torch

from attend.model.errors import SettingError
from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.outliers import put_outliers, write_with_outliers
from attend.model.sublayers import LatentSpec
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import tiny_config, tiny_decoder

TOKENS = torch.tensor([[5, 17, 80, 3, 44, 61, 9, 2]])
LATENT = {"num_kv_heads": 1, "head_size": 16}
SWITCHES = [
    {},
    {"norm": "layernorm", "gated_mlp": False},
    {"norm_place": "sandwich"},
    {"norm_place": "parallel"},
    {"norm_place": "shared"},
    {"tied_head": True, "qkv_bias": True},
    {"num_experts": 4, "experts_per_token": 2, "shared_expert_size": 20},
    LATENT | {"latent": LatentSpec(rank=12, query_rank=None, key_size=6, rope_size=4, value_size=5)},
    LATENT | {"latent": LatentSpec(rank=12, query_rank=10, key_size=6, rope_size=4, value_size=5)},
]


@torch.no_grad()
@pytest.mark.parametrize("factor", [64.0, 10.0])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_model_with_outliers_has_the_logits_that_it_had(switches, factor):
    net, changed = (tiny_decoder(tiny_config(**switches)) for _ in range(2))
    put_outliers(changed, factor)
    before, after = (each.logits(hidden_states(each, TOKENS)) for each in (net, changed))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_a_model_without_norms_before_its_sublayers_is_refused():
    for place in ("post", "output"):
        with pytest.raises(SettingError, match="no norms before its sublayers"):
            put_outliers(tiny_decoder(tiny_config(norm_place=place)), 8.0)


@torch.no_grad()
def test_a_written_model_with_outliers_is_the_one_that_it_was(tmp_path):
    save(tiny_decoder(tiny_config()), tmp_path / "plain", torch.bfloat16)
    write_with_outliers(tmp_path / "plain", tmp_path / "changed", 64.0)
    nets = [load_decoder(tmp_path / name, torch.float32, "cpu") for name in ("plain", "changed")]
    assert not torch.equal(nets[0].blocks[0].attention_norm.weight, nets[1].blocks[0].attention_norm.weight)
    before, after = (net.logits(hidden_states(net, TOKENS)) for net in nets)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
