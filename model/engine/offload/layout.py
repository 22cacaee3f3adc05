"""The bytes of blocks in the KV cache: what a block of each KV cache group is in all of its layers together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attend.model.engine.config import EngineConfig
from attend.model.net.kv_cache import KVCache

SERIAL = 1 << 15
"""Numbers that torch copies on the calling thread. More would have threads of their own, which the steps' need."""


class BlockLayout:
    """Reads and writes blocks of a cache in the memory of the host, while steps compute with others."""

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        parts: list[list[Tensor]] = [[] for _ in config.groups]
        for layer in range(len(cache.keys)):
            group = cache.group_of_layer[layer] if cache.group_of_layer else 0
            if layer in cache.states:
                parts[group] += cache.states[layer]
            elif not cache.kv_layers or cache.kv_layers[layer] is None:
                parts[group] += [cache.keys[layer]] if cache.values_are_keys else [cache.keys[layer], cache.values[layer]]
        blocks = [size.num_blocks + 1 for size in config.groups]
        self._parts = [[_rows(part, count) for part in of] for of, count in zip(parts, blocks, strict=True)]
        self.sizes = [sum(part.shape[1] * part.itemsize for part in of) for of in self._parts]
        """Bytes of a block of each group."""

    def read(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks, each block's by itself."""
        places = torch.tensor(blocks)
        found = torch.cat([_take_places(part, places).view(torch.uint8) for part in self._parts[group]], dim=1)
        return [memoryview(row.numpy()) for row in found]

    def write(self, group: int, blocks: Sequence[int], data: Sequence[bytes | bytearray | memoryview]) -> None:
        """Put such bytes into some blocks, which nobody reads before this has returned."""
        rows = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8).view(len(blocks), -1)
        places, start = torch.tensor(blocks), 0
        for part in self._parts[group]:
            size = part.shape[1] * part.itemsize
            new = rows[:, start : start + size].contiguous().view(part.dtype)
            for some, values in zip(_few(places, part), _few(new, part), strict=True):
                part.index_copy_(0, some, values)
            start += size


def _rows(part: Tensor, num_blocks: int) -> Tensor:
    """A part of the cache, a row for each block, in the widest integers that fit."""
    rows = part.flatten(1).view(torch.uint8).view(num_blocks, -1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.data_ptr() % 8 == 0 else rows


def _few(rows: Tensor, part: Tensor) -> tuple[Tensor, ...]:
    """Rows in pieces that one thread copies."""
    return torch.split(rows, max(1, SERIAL // part.shape[1]))


def _take_places(part: Tensor, places: Tensor) -> Tensor:
    return torch.cat([part.index_select(0, some) for some in _few(places, part)])
