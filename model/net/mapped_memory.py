"""Tensors in mapped memory. Pages of a file come into memory when they are read, and leave it when they are released."""

import ctypes
import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_MADV_WILLNEED, _MADV_DONTNEED, _MADV_POPULATE_READ = 3, 4, 22
_LOOKED_AT = 1 << 16
"""Pages that are looked at in one call: the kernel notes each in a byte."""
_libc = ctypes.CDLL(None)


def read_ahead(tensor: Tensor) -> None:
    """Have the system begin to read the pages of a tensor of a mapped file. Returns at once."""
    _advise(tensor, _MADV_WILLNEED)


def read_now(tensor: Tensor) -> None:
    """Read the pages of a tensor of a mapped file, where the system can (Linux 5.14): else they are read when they are used."""
    _advise(tensor, _MADV_POPULATE_READ)


def _advise(tensor: Tensor, advice: int) -> None:
    page, start = mmap.PAGESIZE, tensor.untyped_storage().data_ptr()
    first, last = start // page * page, start + tensor.untyped_storage().nbytes()
    _madvise(first, last - first, advice)


def _madvise(start: int, size: int, advice: int) -> None:
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def release(tensor: Tensor) -> None:
    """Give back the pages that lie within an unchanged tensor of a mapped file; reading it brings them back.

    Otherwise what was read once would count as this process's memory until the file is closed. Source: madvise(2).
    """
    page, start = mmap.PAGESIZE, tensor.untyped_storage().data_ptr()
    first, last = -(-start // page) * page, (start + tensor.untyped_storage().nbytes()) // page * page
    if first < last:
        _madvise(first, last - first, _MADV_DONTNEED)


def bytes_in_memory(start: int, size: int) -> int:
    """Bytes of the whole pages in `size` bytes from the address `start` that are in memory. Source: mincore(2)."""
    page, held = mmap.PAGESIZE, 0
    first, last = -(-start // page), (start + size) // page
    for begin in range(first, last, _LOOKED_AT):
        there = np.empty(min(_LOOKED_AT, last - begin), np.uint8)
        asked = ctypes.c_void_p(begin * page), ctypes.c_size_t(len(there) * page), ctypes.c_void_p(there.ctypes.data)
        if _libc.mincore(*asked) == 0:
            held += int((there & 1).sum()) * page
    return held


def large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, in large pages where the system has them. A page is taken where it is written to first. Raises MemoryError.

    A step reads pieces of 4 KB from all over the cache: in pages of that size each had to be looked up anew.
    """
    size = count * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
    except OSError as error:  # of a system that promises no more memory than it has
        raise MemoryError(f"out of memory: the system cannot allocate {size} bytes: {error.strerror}") from error
    with suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
