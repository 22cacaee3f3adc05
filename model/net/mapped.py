"""Tensors that lie in a mapped file: pages come into memory when they are read, and leave it when they are released."""

import ctypes
import mmap

from torch import Tensor

_MADV_DONTNEED = 4


def release(tensor: Tensor) -> None:
    """Give back the pages that lie within an unchanged tensor of a mapped file; reading it brings them back.

    Otherwise what was read once would count as this process's memory until the file is closed. Source: madvise(2).
    """
    page, start = mmap.PAGESIZE, tensor.untyped_storage().data_ptr()
    first, last = -(-start // page) * page, (start + tensor.untyped_storage().nbytes()) // page * page
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
