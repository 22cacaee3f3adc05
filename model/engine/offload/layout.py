"""The bytes of blocks in the KV cache: what a block of each KV cache group is in all of its layers together."""

from collections.abc import Sequence

import numpy as np
import torch

from attend.model.engine.config import EngineConfig
from attend.model.net.kv_cache import KVCache


class BlockLayout:
    """Reads and writes blocks of a cache in the memory of the host. NumPy copies on the calling thread, and takes no other."""

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        parts: list[list[torch.Tensor]] = [[] for _ in config.groups]
        for layer in range(len(cache.keys)):
            group = cache.group_of_layer[layer] if cache.group_of_layer else 0
            if layer in cache.states:
                parts[group] += cache.states[layer]
            elif not cache.kv_layers or cache.kv_layers[layer] is None:
                parts[group] += [cache.keys[layer]] if cache.values_are_keys else [cache.keys[layer], cache.values[layer]]
        self._parts = [
            [part.flatten(1).view(torch.uint8).view(size.num_blocks + 1, -1).numpy() for part in some]
            for some, size in zip(parts, config.groups, strict=True)
        ]
        self.sizes = [sum(part.shape[1] for part in some) for some in self._parts]
        """Bytes of a block of each group."""

    def read(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks, each block's by itself."""
        found = np.concatenate([part.take(blocks, axis=0) for part in self._parts[group]], axis=1)
        return [memoryview(row) for row in found]

    def write(self, group: int, blocks: Sequence[int], data: Sequence[bytes | bytearray | memoryview]) -> None:
        """Put such bytes into some blocks."""
        rows, start = np.frombuffer(b"".join(data), np.uint8).reshape(len(blocks), -1), 0
        for part in self._parts[group]:
            part[list(blocks)] = rows[:, start : start + part.shape[1]]
            start += part.shape[1]
