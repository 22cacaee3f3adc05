"""Asynchronous copies of numbers from Python to a device, through pinned memory.

A plain copy to a GPU waits until the GPU has done all that it was given before. From pinned memory it takes its turn instead.
Each copy costs a launch, so a step gathers its numbers in a `HostToDeviceCopy`.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostToDeviceCopy:
    """Whole numbers that go to a device in one copy, when the first of them is read there."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = device
        self._parts: list[NDArray[np.int64]] = []
        self._sent: Sequence[Tensor] | None = None

    def add(self, numbers: "Sequence[int] | array[int] | NDArray[np.int64]") -> int:
        """Put numbers in; returns by which index they are read. Raises RuntimeError after the first was read."""
        if self._sent is not None:
            raise RuntimeError("the copy has been started already")
        self._parts.append(np.asarray(numbers, np.int64).reshape(-1))
        return len(self._parts) - 1

    def __getitem__(self, index: int) -> Tensor:
        """Numbers on the device: int64, in one dimension."""
        if self._sent is None:
            numbers = torch.from_numpy(np.concatenate(self._parts))
            self._sent = torch.split(to_device(numbers, self.device), [len(part) for part in self._parts])
        return self._sent[index]


def integers(values: Iterable[int], device: str | torch.device = "cpu") -> Tensor:
    """An int64 tensor of at least one value: several times faster than `torch.tensor`, which a step calls often."""
    return to_device(torch.frombuffer(array("q", values), dtype=torch.int64), device)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """[R, 1] of the type and on the device of another tensor."""
    return to_device(torch.tensor(values, dtype=like.dtype), like.device)[:, None]


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of the CPU on a device, which is not waited for; the tensor itself where the device is the CPU."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
