"""Ranks in one process, of which one runs at a time: what they exchange passes from hand to hand."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attend.model.parallel.group import ProcessGroup


@dataclass
class Table:
    """What all ranks of a process share."""

    ranks: int
    running: threading.Lock = field(default_factory=threading.Lock)
    parts: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all_there = threading.Barrier(self.ranks, timeout=60)


class Neighbour(ProcessGroup):
    """A rank at a table."""

    def __init__(self, rank: int, device: str, table: Table) -> None:
        self.rank, self.ranks, self.device, self.table = rank, table.ranks, device, table

    def gather(self, x: Tensor) -> Tensor:
        table = self.table
        table.parts[self.rank] = x
        table.running.release()
        table.all_there.wait()
        parts = torch.stack([table.parts[rank] for rank in range(self.ranks)])
        table.all_there.wait()  # before the next parts are laid there
        table.running.acquire()
        return parts


def in_turns(ranks: int, device: str, work: Callable[[ProcessGroup], Any]) -> Sequence[Any]:
    """What `work` returns on each rank."""
    table = Table(ranks)

    def run(rank: int) -> Any:
        with table.running:
            try:
                return work(Neighbour(rank, device, table))
            except BaseException:
                table.all_there.abort()
                raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
