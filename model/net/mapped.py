"""Tensors in mapped memory. Pages of a file come into memory when they are read, and leave it when they are released."""

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_MADV_WILLNEED, _MADV_DONTNEED, _MADV_POPULATE_READ = 3, 4, 22


def read_ahead(tensor: Tensor) -> None:
    """Have the system begin to read the pages of a tensor of a mapped file. Returns at once."""
    _advise(tensor, _MADV_WILLNEED)


def read_now(tensor: Tensor) -> None:
    """Read the pages of a tensor of a mapped file, where the system can (Linux 5.14): else they are read when they are used."""
    _advise(tensor, _MADV_POPULATE_READ)


def _advise(tensor: Tensor, advice: int) -> None:
    page, start = mmap.PAGESIZE, tensor.untyped_storage().data_ptr()
    first, last = start // page * page, start + tensor.untyped_storage().nbytes()
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def release(tensor: Tensor) -> None:
    """Give back the pages that lie within an unchanged tensor of a mapped file; reading it brings them back.

    Otherwise what was read once would count as this process's memory until the file is closed. Source: madvise(2).
    """
    page, start = mmap.PAGESIZE, tensor.untyped_storage().data_ptr()
    first, last = -(-start // page) * page, (start + tensor.untyped_storage().nbytes()) // page * page
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


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
