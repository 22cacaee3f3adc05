"""The process group of tensor parallelism, over gloo or NCCL. Sums are added in the order of the ranks, so that neither the
size of a message nor what else is in a step changes their bits.

Shapes: N ranks.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from attend.model.errors import DeviceFailed

c10d: Any = torch.distributed
"""torch.distributed without types: its stubs lack parts that are used here."""
HOST = "127.0.0.1"
"""All ranks live on one node."""
LOOPBACK = "lo"
"""The interface with this address."""
LATE_SECONDS = 6.0
"""Seconds that a rank waits for another one within a step, over gloo."""
LONGER = 10
"""How many times as long it waits over NCCL, where the computation of the step counts too, and for rank 0's next message: rank
0 sends one every second, but none within a long step.
"""
START_SECONDS = 600.0
"""Seconds that ranks wait for each other before they serve: one may load or compile for longer than another."""
LOOK_SECONDS = 0.1
"""How often a rank that waits for others to begin looks whether they are there, or have ended."""


class ProcessGroup:
    """N ranks that compute the same steps; this process is one of them. One thread at a time may use it."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: str,
        port: int = 0,
        *,
        late: float = LATE_SECONDS,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Rank 0 listens at a free port, `port`; the others connect to it. `connect` waits for all of them, and calls `alive`
        again and again until then: it may raise, where a rank has ended.
        """
        self.rank, self.ranks, self.device = rank, ranks, device
        self._alive = alive
        self._late = timedelta(seconds=late)
        self._patience = self._silence = timedelta(seconds=START_SECONDS)
        self.store = c10d.TCPStore(HOST, port, is_master=rank == 0, timeout=self._patience, wait_for_workers=False)
        self.port: int = self.store.port
        self._numbers: Any = None
        """The process group that exchanges tensors on the device."""
        self._bytes: Any = None
        """The process group that sends bytes from rank 0 to the others."""

    @property
    def is_connected(self) -> bool:
        """True if all ranks have come."""
        return self._bytes is not None

    def connect(self) -> None:
        """Wait for all ranks: NCCL joins GPUs, gloo CPUs. Raises DeviceFailed where one does not come."""
        with _among_others():
            self.store.set(f"rank {self.rank}", "here")
            everyone, waited = [f"rank {rank}" for rank in range(self.ranks)], 0.0
            while not self.store.check(everyone):
                self._alive()
                time.sleep(LOOK_SECONDS)
                waited += LOOK_SECONDS
                if waited > START_SECONDS:
                    raise DeviceFailed(f"not all {self.ranks} ranks of the model started within {START_SECONDS:g} s")
            self._bytes = self._gloo("bytes")
            if self.device.startswith("cuda"):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")  # where its ranks find each other
                self._numbers = c10d.ProcessGroupNCCL(self.store, self.rank, self.ranks, self._patience)  # not run yet
            else:
                self._numbers = self._bytes

    def _gloo(self, name: str) -> Any:
        chosen = c10d.ProcessGroupGloo._Options()
        chosen._devices = [c10d.ProcessGroupGloo.create_device(hostname=HOST)]
        chosen._timeout = self._patience
        return c10d.ProcessGroupGloo(c10d.PrefixStore(name, self.store), self.rank, self.ranks, chosen)

    def hurry(self) -> None:
        """From here on, a rank that others wait for too long has failed: after `late` seconds, or LONGER times that."""
        self._patience, self._silence = self._late, LONGER * self._late
        if self._numbers is not self._bytes:
            # NCCL counts from where a sum is submitted, behind all that the device still has to compute; after this time
            # its watchdog ends the process: not run yet
            self._patience = self._silence
            self._numbers._set_default_timeout(self._silence)

    def gather(self, x: Tensor) -> Tensor:
        """What each rank gives, in their order: [N, ...] of tensors of one shape and dtype. Raises DeviceFailed where a rank
        is late.
        """
        x = x.contiguous()
        parts_N = x.new_empty(self.ranks, *x.shape)
        how = c10d.distributed_c10d.AllgatherOptions()
        how.timeout = self._patience
        with _among_others():
            self._numbers._allgather_base(parts_N.view(-1), x.view(-1), how).wait()
        return parts_N

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the ranks give, added in their order in float32, rounded once: the same bits on all of them."""
        return sum_parts(self.gather(x))

    def least(self, number: int) -> int:
        """The smallest of the whole numbers that the ranks give."""
        return min(int(part) for part in self.gather(torch.tensor([number], device=self.device)))

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's tensor on all ranks, written into `x`."""
        with _among_others():
            self._numbers.broadcast([x], _from_rank_0(self._patience)).wait()
        return x

    def send(self, message: bytes) -> None:
        """Called on rank 0: send a message to the other ranks, which `receive` it."""
        self._pass_on(torch.tensor([len(message)]), self._patience)
        self._pass_on(torch.frombuffer(bytearray(message), dtype=torch.uint8), self._patience)

    def receive(self) -> bytes:
        """Called on the other ranks: wait for a message of rank 0. Raises DeviceFailed where it has ended, or is late."""
        size = self._pass_on(torch.zeros(1, dtype=torch.int64), self._silence)
        return self._pass_on(torch.empty(int(size), dtype=torch.uint8), self._patience).numpy().tobytes()

    def _pass_on(self, x: Tensor, patience: timedelta) -> Tensor:
        with _among_others():
            self._bytes.broadcast([x], _from_rank_0(patience)).wait()
        return x


def sum_parts(parts_N: Tensor) -> Tensor:
    """The sum of N parts, in their order, in float32, rounded once."""
    if parts_N.is_cuda and find_spec("triton") is not None:
        from attend.model.net.triton.ranks import add_parts as in_one_pass

        return in_one_pass(parts_N)
    total: Tensor = parts_N[0].float()
    for part in parts_N[1:]:
        total += part
    return total.to(parts_N.dtype)


def _from_rank_0(patience: timedelta) -> Any:
    how = c10d.BroadcastOptions()
    how.rootRank, how.rootTensor, how.timeout = 0, 0, patience
    return how


@contextmanager
def _among_others() -> Iterator[None]:
    """What the libraries raise, as DeviceFailed: no rank can go on without the others."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFailed(f"a rank of the model is gone or late: {error}") from error
