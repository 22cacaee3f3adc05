"""The metadata of an architecture in a GGUF file, which remembers what was read: the rest is refused."""

import mmap
import struct
from typing import Any

import numpy

from attend.model.errors import CheckpointError
from attend.model.gguf.container import Container

Raw = dict[str, Any]
"""The entries of a config.json."""
HARMLESS = frozenset({"vocab_size", "attention.value_length", "expert_group_count", "expert_group_used_count"})
"""Keys that repeat what the tensors say, or whose values are checked beside them."""
BY_LAYER = {"gemma4": ("feed_forward_length", "attention.head_count_kv")}
"""Keys of an architecture whose values differ from layer to layer."""


def shortest(value: float) -> float:
    """Of the numbers that float32 keeps alike the one with the fewest digits, as the model's maker wrote it."""
    return float(str(numpy.float32(value)))


class Keys:
    """The metadata of an architecture by what follows its name, ARCH.NAME; remembers which were read."""

    def __init__(self, container: Container) -> None:
        self.container = container
        arch = container.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise self.wrong(f"general.architecture must be a string; got {repr(arch)[:100]}")
        self.arch = arch
        start = f"{self.arch}."
        self._values = {key[len(start) :]: value for key, value in container.metadata.items() if key.startswith(start)}
        self._read = set(HARMLESS)

    def wrong(self, what: str) -> CheckpointError:
        """The error for something that is wrong with the file."""
        return CheckpointError(f"{self.container.path}: {what}")

    def get(self, name: str) -> Any:
        """A value, or None. Where an array has one for each layer, they must all be the same, and it is that one; but it is the
        first of those that the architecture may have differ.
        """
        self._read.add(name)
        value = self._values.get(name)
        if isinstance(value, list):
            if not value or (name not in BY_LAYER.get(self.arch, ()) and any(each != value[0] for each in value)):
                raise self.wrong(f"{self.arch}.{name} differs from layer to layer, which is not supported")
            value = value[0]
        return value

    def layers(self, name: str) -> list[Any] | None:
        """An array with a value for each layer, None where there is none."""
        self._read.add(name)
        value = self._values.get(name)
        return value if isinstance(value, list) else None

    def array(self, name: str) -> list[Any] | None:
        """An array, None where there is no such key."""
        if (value := self.layers(name)) is None and name in self._values:
            raise self.wrong(f"{self.arch}.{name} must be an array; got {repr(self._values[name])[:100]}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer, or the default where the key is absent. Raises CheckpointError for anything else."""
        value = self.get(name) if self.get(name) is not None else default
        if type(value) is not int or not 1 <= value < 1 << 32:
            raise self.wrong(f"{self.arch}.{name} must be a positive integer of 32 bits; got {repr(value)[:100]}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number, see `shortest`; or the default where the key is absent. Raises CheckpointError for anything else."""
        value = self.get(name) if self.get(name) is not None else default
        if type(value) not in (int, float):
            raise self.wrong(f"{self.arch}.{name} must be a number; got {repr(value)[:100]}")
        assert value is not None
        return shortest(value)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Stop at a key that changes the arithmetic in a way that is not built."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.wrong(f"{self.arch}.{name} = {repr(value)[:100]} is not supported")

    def check_all_read(self) -> None:
        """Raise CheckpointError where there is a key that nobody asked for."""
        if unknown := sorted(self._values.keys() - self._read):
            raise self.wrong(f"{self.arch}.{unknown[0]} is an unknown key, which may change what the model computes")

    def has(self, tensor: str) -> bool:
        """True if the files have a tensor."""
        return tensor in self.container.tensors

    def numbers(self, tensor: str) -> list[float]:
        """The numbers of a small tensor in float32: factors of rope."""
        stored = self.container.tensors[tensor]
        if stored.kind.name != "F32" or len(stored.shape) != 1 or stored.size > mmap.PAGESIZE:
            raise self.wrong(f"tensor {tensor} must have at most {mmap.PAGESIZE // 4} elements in F32")
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            return list(struct.unpack(f"<{stored.shape[0]}f", file.read(stored.size)))
