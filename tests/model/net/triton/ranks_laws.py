"""Ranks that share a decoder, each with Triton's kernels on its part. Run as those of attention are, see `laws.py`."""

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.errors import SettingError
from attend.model.net.checkpoint import read_config, save
from attend.model.net.paged_attention import TorchBackend
from attend.model.net.triton.backend import TritonBackend
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.net.triton.ranks import add_parts
from attend.model.parallel import group
from attend.model.parallel.shards import config_of, load_shard
from tests.model.checkpoints import tiny_config
from tests.model.net.triton.decoder_laws import DEVICE, decoder_of, two_steps
from tests.model.parallel.turns import in_turns

SHARED = {"llama": 2, "qwen3": 2, "granite": 4, "gpt2": 2, "2017": 4, "gpt_neox": 2}
"""Models that so many ranks share; of 4 ranks two have the same key/value head."""


@pytest.mark.parametrize("name", SHARED)
def test_ranks_compute_what_one_decoder_does(name, tmp_path):
    whole, ranks = decoder_of(name), SHARED[name]
    save(whole, tmp_path, torch.float32)
    wanted = two_steps(whole, whole, TorchBackend(whole.config.attention_variants))

    def shared(mine):
        net = load_shard(tmp_path, read_config(tmp_path), torch.float32, mine)
        net.reach(64)
        return two_steps(TritonDecoder(net), net, TritonBackend(net.config.attention_variants))

    for found in in_turns(ranks, DEVICE, shared):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 40), (4, 2, 1100), (8, 1, 2048)], ids=str)
def test_parts_are_added_in_the_order_of_the_ranks_to_the_bit(dtype, shape):
    parts_N = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert torch.equal(add_parts(parts_N.to(DEVICE)).cpu(), group.sum_parts(parts_N))


@pytest.mark.parametrize(
    "switches", [{"qk_norm": "all"}, {"num_experts": 4, "experts_per_token": 2, "expert_size": 16}], ids=str
)
def test_what_the_kernels_do_not_compute_in_parts_is_torchs(switches):
    config, at = config_of(tiny_config(**switches), 2), Placement(torch.float32, "cuda", 32, is_sharded=True)
    assert choose_backend("auto", config, at).name == "torch"
    with pytest.raises(SettingError, match="does not support this model with tensor_parallel"):
        choose_backend("triton", config, at)
    assert choose_backend("auto", config_of(tiny_config(), 2), at).name == "triton"
