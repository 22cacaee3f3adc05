"""Tensors in safetensors files, plain or in MXFP4."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.errors import CheckpointError
from model.net import mxfp4
from model.net.families.reading import Family
from model.net.formats.codes import Codes
from model.net.formats.weights import Place, Weights
from model.weights import INDEX, check_header, read_index, weight_files

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""What weights may be stored in, under safetensors' names; an eight-bit float needs scales that are not read."""


class Safetensors(Weights):
    """The safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, weight_files(folder))
        self._opened = {path.name: _open(path) for path in self.files}
        for file, handle in self._opened.items():
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if self.where.setdefault(name, file) != file:
                    self.problems.append(f"tensor {name} is in {self.where[name]} and in {file}")
        for name, file in (read_index(folder) or {}).items():
            if self.where.get(name) != file:
                self.problems.append(f"{INDEX} says that tensor {name} is in {file}, which lacks it")

    def close(self) -> None:
        """Let go of the files."""
        self._opened.clear()

    def dtypes(self) -> set[str]:
        """What the tensors are stored in, as torch names it where it does."""
        kinds = {self._opened[file].get_slice(name).get_dtype() for name, file in self.where.items()}
        return {STORED.get(kind, kind) for kind in kinds}

    def spelled(self, family: Family) -> Family:
        """The family with the fused tensors that are there."""
        fused = {}
        for ours, (theirs, *_) in family.fused.items():
            start, end = theirs.split("{}")
            starts = (start, start.replace(family.optional_part, "", 1))
            if any(name.startswith(starts) and name.endswith(end) for name in self.where):
                fused[ours] = (theirs,)
        return replace(family, weights={**(family.weights or {}), **fused}) if fused else family

    def find(self, name: str, shape: tuple[int, ...], optional: str) -> list[Place] | None:
        """(name, file) of what holds a tensor of this shape, itself or its MXFP4 parts; None after noting what is wrong."""
        parts = {name: shape}
        if name not in self.where and f"{name}_blocks" in self.where:
            parts = mxfp4.parts(name, shape)
        stored = STORED if name in parts else mxfp4.STORED
        places = [self._find(part, size, optional, stored) for part, size in parts.items()]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None

    def _find(self, name: str, shape: tuple[int, ...], optional: str, dtypes: Collection[str]) -> Place | None:
        short = name.replace(optional, "", 1)
        name = name if name in self.where or short not in self.where else short
        if name not in self.where:
            self.problems.append(f"tensor {name} is missing")
            return None
        self.used.add(name)
        file = self.where[name]
        tensor = self._opened[file].get_slice(name)
        found, stored = tensor.get_shape(), tensor.get_dtype()
        if stored not in dtypes:
            self.problems.append(f"{file}: tensor {name} is {stored}, expected one of {', '.join(dtypes)}")
            return None
        if found != list(shape):
            self.problems.append(f"{file}: tensor {name} has shape {found}, expected {list(shape)}")
            return None
        return name, file

    def _mapped(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[self.where[name]].get_tensor(name)
        return tensor

    def _numbers(self, name: str, held: list[Tensor]) -> Iterator[Tensor | Codes]:
        """The tensor itself, or the experts of one in MXFP4, one after the other."""
        return iter(held) if len(held) == 1 else _unpacked(*held)


def _open(path: Path) -> Any:
    try:
        check_header(path)  # and safe_open calls a file that it may not read a missing one
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _unpacked(blocks: Tensor, scales: Tensor) -> Iterator[Tensor]:
    """Experts [1, in, out]: all of them at once would take their room twice."""
    for expert in range(len(blocks)):
        yield mxfp4.unpack(blocks[expert : expert + 1], scales[expert : expert + 1]).mT
