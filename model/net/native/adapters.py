"""LoRA adapters in the native decoder: each is copied once, and named by its address for the tokens of a step."""

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.adapters import Adapter, AdapterBatch, LowRank
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.native.packing import numbers_of_matrices

NO_ROOM = "out of memory: an adapter does not fit"


class NativeAdapters:
    """Computes the adapters of a step's tokens, in the same order of sums for a token whatever is computed beside it."""

    def __init__(self, net: NativeDecoder) -> None:
        self._net, self._library = net.handle, net.library
        self._decoder = net  # whose memory the adapters' copies point to
        self._numbers = numbers_of_matrices(net.config)
        self._copies: weakref.WeakKeyDictionary[Adapter, _Copy] = weakref.WeakKeyDictionary()

    def prepare(self, adapter: Adapter) -> Adapter:
        """One of the same content, whose matrices are where the library reads them, and go with it."""
        copy, kept = _Copy(self._library, self._net), Adapter(adapter.digest, {})
        for name, low in adapter.matrices.items():
            if name not in self._numbers:
                raise CheckpointError(f"an adapter of {name} is not computed by the native backend, but by backend = torch")
            copy.copy_matrix(self._numbers[name], low)
        self._copies[kept] = copy
        return kept

    def use(self, groups: Sequence[AdapterBatch], num_tokens: int) -> None:
        """See Adapted."""
        of_token_T = torch.zeros(num_tokens, dtype=torch.int64)
        for adapter, tokens in groups:
            of_token_T[torch.tensor(tokens)] = self._copies[adapter].address
        ranks = max((self._copies[adapter].ranks for adapter, _ in groups), default=0)
        if self._library.attend_adapt(self._net, of_token_T.data_ptr(), num_tokens, ranks):
            raise MemoryError(NO_ROOM)


class _Copy:
    """The library's form of an adapter."""

    def __init__(self, library: ctypes.CDLL, net: int) -> None:
        self._library, self._net = library, net
        self.ranks = 0
        self.address: int = library.attend_adapter_new(net)
        if self.address is None:
            raise MemoryError(NO_ROOM)
        weakref.finalize(self, library.attend_adapter_free, self.address).atexit = False

    def copy_matrix(self, number: int, low: LowRank) -> None:
        """Add the matrices A and B for the packed matrix `number`."""
        down_RI, up_OR = low.down_RI.contiguous(), low.up_OR.contiguous()
        numbers = [(rows.start, rows.stop, ranks.start, ranks.stop) for rows, ranks in low.parts]
        parts: Tensor = torch.tensor(numbers, dtype=torch.int64)
        sizes = (len(down_RI), down_RI.shape[1])
        pointers = (down_RI.data_ptr(), up_OR.data_ptr())
        if self._library.attend_adapter_set(self._net, self.address, number, *pointers, *sizes, parts.data_ptr(), len(parts)):
            raise MemoryError(NO_ROOM)
        self.ranks = max(self.ranks, len(down_RI))
