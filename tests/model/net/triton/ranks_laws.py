"""Ranks that share a decoder, each with Triton's kernels on its part. Run as those of attention are, see `laws.py`."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attend.model.engine.choice import choose_backend
from attend.model.errors import SettingError
from attend.model.net.backends import TorchBackend
from attend.model.net.checkpoint import read_config, save
from attend.model.net.triton import sums
from attend.model.net.triton.backend import TritonBackend
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.parallel.group import ProcessGroup
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

    def shared(group):
        net = load_shard(tmp_path, read_config(tmp_path), torch.float32, group)
        net.reach(64)
        return two_steps(TritonDecoder(net), net, TritonBackend(net.config.attention_variants))

    for found in in_turns(ranks, DEVICE, shared):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "switches", [{"qk_norm": "all"}, {"num_experts": 4, "experts_per_token": 2, "expert_size": 16}], ids=str
)
def test_what_the_kernels_do_not_compute_in_parts_is_torchs(switches):
    config = config_of(tiny_config(**switches), 2)
    assert choose_backend("auto", config, torch.float32, "cuda", 32, shared=True).name == "torch"
    with pytest.raises(SettingError, match="does not support this model with tensor_parallel"):
        choose_backend("triton", config, torch.float32, "cuda", 32, shared=True)
    assert choose_backend("auto", config_of(tiny_config(), 2), torch.float32, "cuda", 32, shared=True).name == "triton"


class Nccl:
    """What joins the GPUs of some ranks: it lays their parts where it is told to."""

    def __init__(self, parts):
        self.parts, self.calls = parts, 0

    def _allgather_base(self, output, given, how):
        self.calls += 1
        output.copy_(torch.stack(self.parts).view_as(output))
        return SimpleNamespace(wait=lambda: None)


LAUNCH_NOTHING = {"empty", "empty_like", "new_empty", "select", "view"}


class Counting(TorchDispatchMode):
    """Counts what torch launches."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.launches += function._schema.name.removeprefix("aten::") not in (
            "empty",
            "empty_like",
            "new_empty",
            "select",
            "view",
        )
        return function(*args, **kwargs or {})


def joined(parts):
    """Rank 0 of those that give these parts."""
    group = ProcessGroup.__new__(ProcessGroup)
    group.rank, group.ranks, group._numbers, group._patience = 0, len(parts), Nccl(parts), timedelta(seconds=1)
    return group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_launch_sums_the_parts_of_ranks_to_the_bit(ranks, dtype):
    """In their order: as the ranks of CPUs do, one part after the other."""
    dice = torch.Generator().manual_seed(ranks)
    for shape in ((1,), (3, 700), (5, 4096)):
        parts = [torch.randn(shape, generator=dice).to(DEVICE, dtype) * 3.0**at for at in range(ranks)]
        wanted = parts[0].float()
        for part in parts[1:]:
            wanted = wanted + part
        found = joined(parts)._summed(parts[0])
        assert found.dtype == dtype
        assert torch.equal(found, wanted.to(dtype))


def test_a_sum_over_ranks_is_one_exchange_and_one_launch(monkeypatch):
    """Before, of N ranks: N tensors to copy to, N additions and roundings; torch's copies out of its own tensor beside."""
    parts, launched = [torch.ones(4, 8, device=DEVICE) for _ in range(4)], []
    monkeypatch.setattr(sums, "sum_kernel", {(1,): lambda *args, **more: launched.append(more)})
    group, by_parts = joined(parts), Counting()
    with Counting() as counting:
        group._numbers._allgather_base = lambda *args: SimpleNamespace(wait=lambda: None)
        group._summed(parts[0])
    assert (counting.launches, len(launched)) == (0, 1)
    with by_parts:
        ProcessGroup.sum(SimpleNamespace(gather=lambda x: parts), torch.ones(4, 8))
    assert by_parts.launches >= 4
