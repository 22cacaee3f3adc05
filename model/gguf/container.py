"""The GGUF container: metadata, and where each tensor lies. Source: docs/gguf.md of ggml, versions 2 and 3.

    header    "GGUF", version, number of tensors, number of metadata
    metadata  (name, type, value) each; an array says the type of its elements and their number
    tensors   (name, sizes, the fastest first, type, offset) each
    padding   to a multiple of general.alignment, then the tensors' bytes

All is little-endian. A number that promises more than the file has is refused before memory is taken for it.
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from attend.model.errors import CheckpointError
from attend.model.gguf.paths import lfs_advice, split_files

MAX_ITEMS = 1 << 22
"""Metadata, elements of their arrays, and tensors of a file: a vocabulary of 262,144 tokens with its merges has 1.4 million."""
MAX_BYTES = 1 << 27
"""Largest size of a file's metadata, in bytes."""
MAX_DIMENSIONS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of numbers, as `struct` spells them."""
STRING, ARRAY = 8, 9
KINDS = {int(kind): kind for kind in GGMLQuantizationType}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's type, shape and place in a file."""

    file: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Shape of the tensor, rows first."""
    start: int
    """Byte of the file that it begins at."""
    size: int
    """Size of the tensor in its file, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """What the files of a checkpoint say before their tensors' numbers."""

    path: Path
    """The first file of a split model, or the only one."""
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    """Metadata of the first file."""
    tensors: dict[str, StoredTensor]
    """Tensors of all files, by name."""


def read_container(path: Path) -> Container:
    """The container of a GGUF file, or of all parts of a split one. Raises CheckpointError."""
    files = split_files(path)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, Any] = {}
    for at, file in enumerate(files):
        said, held = _read(file)
        metadata = metadata or said
        if len(files) > 1 and (said.get("split.count"), said.get("split.no")) != (len(files), at):
            raise CheckpointError(f"{file}: its metadata does not say that it is part {at + 1} of {len(files)}")
        if twice := sorted(tensors.keys() & held.keys()):
            raise CheckpointError(f"{file}: tensor {twice[0]} is in {tensors[twice[0]].file.name}, too")
        tensors |= held
    if (count := metadata.get("split.count", 1)) not in (0, len(files)):
        raise CheckpointError(f"{path} is one of {count} parts: give the first, NAME-00001-of-{count:05}.gguf")
    if (promised := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} tensors, but split.tensors.count is {promised}")
    return Container(path, tuple(files), metadata, tensors)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors of one file."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            if size < 24:
                raise CheckpointError(f"{file} has {size} bytes: it is no GGUF file, or it is cut off")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


class _Reader:
    """Takes one value after the other from a file; whatever would lie beyond its end raises CheckpointError."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data = file, data
        self._size, self._at = len(data), 0
        self._end = min(self._size, MAX_BYTES)
        self._items = 0

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if self._data[:4] != b"GGUF":
            raise self._wrong(f"it does not begin with GGUF{lfs_advice(self._file)}")
        self._at = 4
        version, tensors, values = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            why = "a big-endian file" if version & 0xFFFF == 0 else f"version {version} of the format"
            raise self._wrong(f"{why} is not read; known: versions 2 and 3, little-endian")
        self._count(values, "metadata")
        metadata: dict[str, Any] = {}
        for _ in range(values):
            name = self._string("the name of a value")
            if name in metadata:
                raise self._wrong(f"{name} stands twice in the metadata")
            metadata[name] = self._value(self._number("I"), name)
        self._count(tensors, "tensors")
        described = [self._tensor() for _ in range(tensors)]
        return metadata, self._place_tensors(described, self._alignment(metadata))

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {what}")

    def _count(self, count: int, what: str) -> None:
        """Refuse more items than are read of a file."""
        self._items += count
        if self._items > MAX_ITEMS:
            raise self._wrong(f"{count} {what} are more than the {MAX_ITEMS} items that are read of a file")

    def _truncated_error(self, what: str) -> CheckpointError:
        if self._end < self._size:
            return self._wrong(f"{what} at byte {self._at}: more than {MAX_BYTES} bytes before the tensors are not read")
        return self._wrong(f"{what} at byte {self._at} do not fit into its {self._size} bytes: it is damaged or cut off")

    def _bytes(self, size: int, what: str) -> bytes:
        if size > self._end - self._at:
            raise self._truncated_error(f"{size} bytes of {what}")
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form), "a number"))[0]

    def _string(self, what: str) -> str:
        taken = self._bytes(self._number("Q"), what)
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"{what} at byte {self._at} is not UTF-8") from error

    def _value(self, kind: int, name: str) -> Any:
        if kind == STRING:
            return self._string(name)
        if kind != ARRAY:
            return self._number(self._scalar(kind, name))
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            return self._strings(count, name)
        form = self._scalar(kind, name)
        self._count(count, f"elements of {name}")
        return list(struct.unpack(f"<{count}{form}", self._bytes(struct.calcsize(f"<{count}{form}"), name)))

    def _strings(self, count: int, name: str) -> list[str]:
        """An array of strings: there may be a million of them, so no call is made for each."""
        self._count(count, f"strings of {name}")
        found, data, at, end = [], self._data, self._at, self._end
        try:
            for _ in range(count):
                stop = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
                if stop > end:
                    break
                found.append(data[at + _LENGTH.size : stop].decode())
                at = stop
        except (struct.error, UnicodeDecodeError) as error:
            raise self._wrong(f"a string of {name} at byte {at} is not UTF-8, or cut off") from error
        self._at = at
        if len(found) < count:
            raise self._truncated_error(f"string {len(found)} of {name}")
        return found

    def _scalar(self, kind: int, name: str) -> str:
        if kind not in SCALARS:
            what = "an array of arrays" if kind == ARRAY else f"of the unknown type {kind}"
            raise self._wrong(f"{name} is {what}, which is not read")
        return SCALARS[kind]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the rows first, type, and offset."""
        name = self._string("the name of a tensor")
        count = self._number("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._wrong(f"tensor {name} has {count} dimensions, expected 1 to {MAX_DIMENSIONS}")
        sizes = tuple(self._number("Q") for _ in range(count))
        return name, sizes[::-1], self._number("I"), self._number("Q")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment must be a power of two from 8; got {alignment!r}")
        return alignment

    def _place_tensors(
        self, described: Sequence[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, StoredTensor]:
        """The tensors one after the other, as every writer lays them, so that none can be another's bytes."""
        begin, offset = -(-self._at // alignment) * alignment, 0
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, said in described:
            size = self._size_of(name, shape, kind)
            if said != offset:
                raise self._wrong(f"tensor {name} has the offset {said}, expected {offset}")
            if begin + offset + size > self._size:
                lacking = begin + offset + size - self._size
                raise self._wrong(f"tensor {name} ends {lacking} bytes beyond the file: it is cut off")
            if name in tensors:
                raise self._wrong(f"tensor {name} stands in it twice")
            tensors[name] = StoredTensor(self._file, KINDS[kind], shape, begin + offset, size)
            offset = -(-(offset + size) // alignment) * alignment
        return tensors

    def _size_of(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """Bytes of a tensor of whole blocks."""
        if kind not in KINDS:
            raise self._wrong(f"tensor {name} is of the unknown type {kind}")
        block, size = GGML_QUANT_SIZES[KINDS[kind]]
        if shape[-1] % block:
            raise self._wrong(
                f"tensor {name} has rows of {shape[-1]} elements, which is not a multiple of the block size {block}"
            )
        count = 1
        for each in shape:
            count *= each
        if count == 0:
            raise self._wrong(f"tensor {name} has shape {list(shape)}: it is empty")
        return int(count // block * size)
