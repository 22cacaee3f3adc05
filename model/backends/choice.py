"""Which backend serves: the one that is asked for, or the fastest that computes the model on this device."""

from attend.model.backends.backend import Backend, Placement
from attend.model.backends.native import Native
from attend.model.backends.reference import Reference
from attend.model.backends.torch import Torch
from attend.model.backends.triton import Triton
from attend.model.config import ModelConfig
from attend.model.errors import SettingError

BACKENDS: dict[str, type[Backend]] = {kind.name: kind for kind in (Native, Triton, Torch, Reference)}
FASTEST_FIRST = (Native, Triton, Torch)


def choose_backend(name: str, config: ModelConfig, at: Placement) -> Backend:
    """`auto` is the fastest that fits. A backend that does not compute this model there is refused with SettingError."""
    for kind in FASTEST_FIRST if name == "auto" else (BACKENDS[name],):
        refusal = kind.absence() or kind.refusal(config, at)
        if refusal is None:
            return kind(config)
    assert name != "auto" and refusal is not None, "torch computes every model"
    raise SettingError(f"backend is {name}, but {refusal.why}")


def fastest(device: str) -> type[Backend]:
    """The backend that is meant for a device."""
    return Triton if device == "cuda" else Native
