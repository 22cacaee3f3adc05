"""Tensors in safetensors files: plain, or in the format that config.json names."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.families.family import Family
from attend.model.net.families.table import spelling_of, spellings, with_prefix
from attend.model.net.formats.codes import CodeLayout, Codes
from attend.model.net.formats.compressed_tensors import CompressedTensors
from attend.model.net.formats.format import Part
from attend.model.net.formats.table import format_of, unread_tensor
from attend.model.net.formats.weights import Place, Weights
from attend.model.weights import INDEX, WHOLE, open_safetensors, passed_over, read_index, read_json, weight_files

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""What plain weights may be stored in, under safetensors' names."""


class _FoundMatrix(NamedTuple):
    """A matrix in the folder's format whose tensors were found."""

    name: str
    shape: Sequence[int]
    roles: list[str]
    """Roles of the tensors that hold it."""


class Safetensors(Weights):
    """The safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.format = format_of(read_json(folder, "config.json"))
        if self.format is not None:
            self.title, self.notes = self.format.title, self.format.notes
        self._asked: dict[str, _FoundMatrix] = {}
        super().__init__(folder, weight_files(folder))
        self._opened = {path.name: open_safetensors(path) for path in self.files}
        for file, handle in self._opened.items():
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if self.where.setdefault(name, file) != file:
                    self.problems.append(f"tensor {name} is in {self.where[name]} and in {file}")
        if self.format is None and (unread := unread_tensor(self.where)):
            raise CheckpointError(f"{folder}: {unread}")
        told = passed_over(folder)
        self.notes = (*self.notes, told) if told else self.notes
        table = None if self.files[0].name == WHOLE else read_index(folder)
        for name, file in (table or {}).items():
            if self.where.get(name) != file:
                self.problems.append(f"{INDEX} says that tensor {name} is in {file}, which lacks it")

    def close(self) -> None:
        """Close the files that were opened."""
        self._opened.clear()

    def dtypes(self) -> set[str]:
        """What the tensors are stored in, as torch names it where it does."""
        kinds = {self._opened[file].get_slice(name).get_dtype() for name, file in self.where.items()}
        return {STORED.get(kind, kind) for kind in kinds}

    def resolve_names(self, family: Family) -> Family:
        """The family with the prefix of the names that are there, and with the fused tensors."""
        try:
            prefix = spelling_of(family, self.where)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        if isinstance(self.format, CompressedTensors):
            self.format.spell(prefix, spellings(family))
        family, fused = with_prefix(family, prefix), {}
        for ours, theirs in family.fused_tensors.items():
            plain = (family.weights or {})[ours]
            if self._layers_with(theirs[0]):
                fused |= {ours: theirs} | {ours.replace("{}", layer): plain for layer in self._layers_with(plain[0])}
        return replace(family, weights={**(family.weights or {}), **fused}) if fused else family

    def _layers_with(self, template: str) -> list[str]:
        """The numbers of the layers, or of the blocks, that have a tensor of this name, of experts the first one's."""
        start, end = template.replace("{e}", "0").split("{}")
        return [name[len(start) : len(name) - len(end)] for name in self.where if name.startswith(start) and name.endswith(end)]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Weights`."""
        return tuple(self._opened[self.where[name]].get_slice(name).get_shape()) if name in self.where else None

    def find(self, name: str, shape: tuple[int, ...]) -> list[Place] | None:
        """(name, file) of what holds a tensor of this shape, itself or its parts; None after noting what is wrong."""
        if self.format is None or len(shape) < 2 or not self.format.holds(name, self._find_stored):
            place = self._find(Part(name, tuple(STORED), (tuple(shape),)))
            return None if place is None else [place]
        try:
            parts = self.format.parts(name, shape, self._find_stored)
        except ValueError as error:
            self.problems.append(f"{self.where.get(name, self.path.name)}: tensor {name}: {error}")
            return None
        parts = {role: part for role, part in parts.items() if not part.optional or part.name in self.where}
        places = [self._find(part) for part in parts.values()]
        found = [place for place in places if place is not None]
        if len(found) < len(places):
            return None
        self._asked[found[0][0]] = _FoundMatrix(name, shape, list(parts))
        return found

    def form(self, name: str) -> CodeLayout | None:
        """See `Weights`: the codes of a matrix in the folder's format."""
        if self.format is None or not self.format.holds(name, self._find_stored):
            return None
        return self.format.form(name, lambda part: self._map_tensor(part) if part in self.where else None)

    def _find_stored(self, name: str) -> str | None:
        file = self.where.get(name)
        return None if file is None else str(self._opened[file].get_slice(name).get_dtype())

    def _find(self, part: Part) -> Place | None:
        name = part.name
        if name not in self.where:
            self.problems.append(f"tensor {name} is missing")
            return None
        self.used.add(name)
        file = self.where[name]
        tensor = self._opened[file].get_slice(name)
        found, stored = tensor.get_shape(), tensor.get_dtype()
        if stored not in part.stored_dtypes:
            self.problems.append(f"{file}: tensor {name} is {stored}, expected one of {', '.join(part.stored_dtypes)}")
            return None
        if tuple(found) not in part.shapes:
            expected = " or ".join(str(list(shape)) for shape in part.shapes)
            self.problems.append(f"{file}: tensor {name} has shape {found}, expected {expected}")
            return None
        return name, file

    def _map_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[self.where[name]].get_tensor(name)
        return tensor

    def _numbers(self, name: str, held: list[Tensor]) -> Iterator[Tensor | Codes]:
        """The tensor itself, or what its format makes of its parts."""
        asked = self._asked.get(name)
        if asked is None or self.format is None:
            yield from held
            return
        try:
            yield from self.format.read(asked.name, asked.shape, dict(zip(asked.roles, held, strict=True)))
        except ValueError as error:
            self.problems.append(f"{self.where[name]}: tensor {name}: {error}")

    def _is_spare(self, name: str) -> bool:
        return self.format is not None and self.format.is_spare(name, lambda: self._map_tensor(name))
