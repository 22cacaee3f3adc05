"""The ranks of a model, and what they exchange. Sums run in the order of the ranks, so that neither the size of a message nor
what else is in a step changes their bits.

Shapes: N ranks.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

c10d: Any = torch.distributed
"""Its stubs leave out what is used here."""
HOST = "127.0.0.1"
"""All ranks live on one node."""
LATE_SECONDS = 6.0
"""How long a rank waits for another one within a step."""
START_SECONDS = 600.0
"""How long ranks wait for each other to begin: the first of them may be loaded long before the last."""


class Group:
    """N ranks that compute the same steps; this process is one of them. One thread alone may use it."""

    def __init__(self, rank: int, ranks: int, device: str, port: int = 0, *, late: float = LATE_SECONDS) -> None:
        """Rank 0 listens at a free port, `port`; the others connect to it. `connect` waits for all of them."""
        self.rank, self.ranks, self.device = rank, ranks, device
        self.late = timedelta(seconds=late)
        self.store = c10d.TCPStore(
            HOST, port, is_master=rank == 0, timeout=timedelta(seconds=START_SECONDS), wait_for_workers=False
        )
        self.port = self.store.port
        self._group: Any = None

    def connect(self) -> None:
        """Wait for all ranks: NCCL joins GPUs, gloo CPUs. Raises RuntimeError where one does not come."""
        self.store.set(f"rank {self.rank}", "here")
        everyone = [f"rank {rank}" for rank in range(self.ranks)]
        self.store.wait(everyone)  # as long as it takes to load: gloo waits for `late` alone
        if self.device.startswith("cuda"):
            self._group = c10d.ProcessGroupNCCL(self.store, self.rank, self.ranks, self.late)  # not run yet
            return
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = self.late
        self._group = c10d.ProcessGroupGloo(self.store, self.rank, self.ranks, options)

    def gather(self, x: Tensor) -> list[Tensor]:
        """What each rank gives, in their order: tensors of one shape and dtype. Raises RuntimeError where a rank is late."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the ranks give, added in their order: the same bits on all of them."""
        first, *others = self.gather(x)
        for part in others:
            first += part
        return first

    def share(self, x: Tensor) -> Tensor:
        """What rank 0 gives, in place."""
        self._group.broadcast([x], _root()).wait()
        return x


def _root() -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
