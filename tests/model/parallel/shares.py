"""A rank of a decoder in a process of its own: `python -m tests.model.parallel.shares RANK RANKS PORT LATE FOLDER...`."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from attend.model.net.checkpoint import read_config
from attend.model.net.kv_cache import KVCache
from attend.model.net.paged_attention import BatchLayout, PagedAttention, Row
from attend.model.net.transformer import Decoder
from attend.model.parallel.group import ProcessGroup
from attend.model.parallel.shards import load_shard
from tests.model.attention import BACKENDS

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = [[5, 9, 3, 7, 11, 2, 60, 33, 8], [4, 4, 17, 80, 1], [90, 12, 45]]
"""Texts of one step."""
BESIDE = 500
"""Rows of a message beside those that are compared."""


@torch.inference_mode()
def scores(net: Decoder, texts: Sequence[Sequence[int]], backend: str = "torch") -> Tensor:
    """The scores [T, V] of texts side by side."""
    config, size = net.config, 8
    rows, at = [], 1
    for text in texts:
        count = -(-len(text) // size)
        rows.append(Row(list(range(at, at + count)), 0, len(text)))
        at += count
    groups, dtype = len(config.memory_groups), next(matrix.dtype for matrix in net.blocks.parameters() if matrix.dim() > 1)
    cache = KVCache.allocate(config, [at] * groups, size, dtype, "cpu")
    layout = BatchLayout.build(rows, size, "cpu", [[row.blocks for row in rows]] * (groups - 1))
    attention = BACKENDS[backend](net.config.attention_variants)
    tokens_T = torch.tensor([token for text in texts for token in text])
    return net.logits(net(tokens_T, layout.positions_T, PagedAttention(attention, cache, layout)))


@contextmanager
def by_row() -> Iterator[None]:
    """Matrix products in which a row has the same bits whatever the others are."""
    together = torch.nn.functional.linear

    def alone(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return torch.cat([together(x_1I, weight_OI, bias_O) for x_1I in x_TI.split(1)])

    with mock.patch.object(torch.nn.functional, "linear", alone):
        yield


def exact(net: Decoder) -> tuple[Tensor, Tensor]:
    """Scores of all texts in one step, and of each alone, where products and attention take each row or text by itself."""
    with by_row():
        return scores(net, TOKENS, "reference"), torch.cat([scores(net, [text], "reference") for text in TOKENS])


def share(
    folder: Path, group: ProcessGroup, dtype: torch.dtype
) -> tuple[Decoder, Tensor, list[Tensor], list[Tensor], tuple[Tensor, Tensor]]:
    """This rank's shard; scores of all texts in one step, and of each alone; the first, as each rank has them; `exact`."""
    net = load_shard(folder, read_config(folder), dtype, group)
    net.reach(64)
    batched, alone = scores(net, TOKENS), [scores(net, [text]) for text in TOKENS]
    return net, batched, alone, group.gather(batched), exact(net)


def part(rank: int) -> Tensor:
    """What a rank gives to a sum, [7, 33]."""
    return torch.randn(7, 33, generator=torch.Generator().manual_seed(rank))


def sums(group: ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
    """Sums [7, 33] over the ranks: in one message, a row at a time, behind other rows, and in bfloat16; the first, as each rank
    has it.
    """
    mine = part(group.rank)
    whole, rows = group.sum(mine), torch.cat([group.sum(row) for row in mine.split(1)])
    behind = group.sum(torch.cat([torch.ones(BESIDE, 33), mine]))[BESIDE:]
    return [whole, rows, behind, group.sum(mine.bfloat16())], group.gather(whole)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, ranks, port, late, *folders = sys.argv[1:]
    group = ProcessGroup(int(rank), int(ranks), "cpu", int(port), late=float(late))
    group.connect()
    for folder in folders:
        for dtype in DTYPES:
            share(Path(folder), group, dtype)
    sums(group)
    os._exit(0)  # gloo's threads abort a process now and then that ends while others close their connections
