"""What ranks exchange on GPUs, counted: the launches of a sum, and the bytes that pass through the device's memory."""

from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch

from attend.model.net.linear import Linear
from attend.model.parallel.group import ProcessGroup
from attend.model.parallel.shards import SummedLinear
from tests.gpu.device import Device
from tests.gpu.steps import standing_in

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

TOKENS, WIDTH = 512, 8192
"""Of a step of a prompt in Llama 70B."""


class Nccl:
    """Stands in for `ProcessGroupNCCL`: what all ranks give comes into one tensor."""

    def __init__(self, device):
        self.device = device

    def wait(self):
        """The stream waits, not the host."""

    def _allgather_base(self, whole, part, how):
        assert whole.numel() % part.numel() == 0
        self.device._launch("NCCL")
        self.device.moved += whole.nbytes
        return self


def group_of(device, ranks):
    """One of so many ranks, whose others are not there."""
    made = object.__new__(ProcessGroup)
    made.rank, made.ranks, made.device, made._patience, made._numbers = 0, ranks, "cuda", timedelta(seconds=1), Nccl(device)
    return made


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sum_is_two_launches_and_reads_each_part_once(ranks):
    """The parts are written by NCCL, and read by the kernel that writes the sum."""
    device = Device("meta")
    with torch.inference_mode(), device, standing_in(device):
        x_TE = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
        device.reset()
        assert group_of(device, ranks).sum(x_TE).shape == x_TE.shape
        assert dict(device.launches) == {"NCCL": 1, "add_kernel": 1}
        assert device.moved == (2 * ranks + 1) * x_TE.nbytes
        assert device.peak - device.allocated <= (ranks + 1) * x_TE.nbytes
        assert not device.waits
        assert [] == device.faults


def test_a_matrix_whose_columns_are_shared_is_a_product_and_a_sum():
    device = Device("meta")
    with torch.inference_mode(), device, standing_in(device):
        with torch.device("meta"):
            linear = SummedLinear.of(Linear(WIDTH // 4, [WIDTH], bias=False), group=group_of(device, 4)).to(torch.bfloat16)
        device.adopt(linear)
        x_TI = torch.empty(TOKENS, WIDTH // 4, dtype=torch.bfloat16, device="cuda")
        device.reset()
        linear(x_TI)
        assert sum(device.launches.values()) == 3
        assert [] == device.faults
