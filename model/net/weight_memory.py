"""True if the weights of a decoder fit into memory, in the form that will serve: asked before they are read."""

from pathlib import Path

import torch

from attend.model.errors import SettingError
from attend.model.machine import available_memory
from attend.model.net.quantised import QuantisedLinear, count_bytes
from attend.model.net.transformer import Decoder

QUANTISED = {"int8": 1 + 2 / 32, "int4": 1 / 2 + 2 / 32}
"""Bytes of a number of a matrix, with its share of a scale."""


def check_weight_memory(net: Decoder, folder: Path, dtype: torch.dtype, device: str, ranks: int = 1) -> None:
    """Refuse weights that do not fit: SettingError, in place of an end by the kernel after minutes of reading.

    `net` has no numbers yet, but the forms of its matrices. It may be the part of one of several `ranks` that share the memory.
    """
    needed, free = count_bytes(net, dtype) * ranks, free_memory(device)
    if needed <= free:
        return
    forms, place = str(dtype).removeprefix("torch."), "of GPU memory" if device == "cuda" else "of memory"
    instead = "a smaller model is needed"
    if any(isinstance(module, QuantisedLinear) for module in net.modules()):
        forms = "quantised weights"
    elif device == "cpu" and ranks == 1:
        sizes = (f"{net.num_parameters * each / 1e9:.1f} GB with quantize={kind}" for kind, each in QUANTISED.items())
        instead = f"they take about {' or '.join(sizes)}"
    raise SettingError(
        f"{folder} does not fit: its weights take {needed / 1e9:.1f} GB as {forms}, "
        f"and {free / 1e9:.1f} GB {place} are free; {instead}"
    )


def free_memory(device: str) -> int:
    """Bytes that may still be taken on a device."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else available_memory()
