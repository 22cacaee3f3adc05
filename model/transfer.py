"""Numbers on their way from Python to a device, which is not waited for.

A plain copy to a GPU waits until the GPU has done all that it was given before. From pinned memory it takes its turn instead.
"""

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


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
