"""Occupancy: how many programs of a kernel run at once on a GPU, by its resources and the kernel's needs."""

from functools import cache
from typing import NamedTuple

import torch

RESERVED = 1024
"""Bytes of shared memory that the system takes of each program."""


class Processors(NamedTuple):
    """The multiprocessors (SMs) of a GPU: how many, and what one has for all its programs. The defaults are an H200's."""

    count: int = 132
    shared_memory: int = 228 << 10
    """Bytes of shared memory of one multiprocessor."""
    registers: int = 65536
    threads: int = 2048

    @classmethod
    @cache
    def here(cls) -> "Processors":
        """The multiprocessors of the current GPU; the defaults without one."""
        if not torch.cuda.is_available():
            return cls()
        gpu = torch.cuda.get_device_properties()
        shared, threads = gpu.shared_memory_per_multiprocessor, gpu.max_threads_per_multi_processor
        return cls(gpu.multi_processor_count, shared, gpu.regs_per_multiprocessor, threads)

    def programs(self, shared_memory: int, registers: int, warps: int) -> int:
        """Programs that run at once: each has so many bytes of shared memory, and its threads so many registers."""
        threads = 32 * warps
        held = -(-max(registers, 1) // 8) * 8 * threads  # registers are given out by eights
        return self.count * max(
            1, min(self.shared_memory // (shared_memory + RESERVED), self.registers // held, self.threads // threads)
        )


DECODES: dict[tuple[object, ...], int] = {}
"""Programs of a decode that run at once, by what its kernel is compiled for; known from its first launch on. More would begin
when the first ones end, and leave most processors idle at the end: so items are taken in turns by so many.
"""
