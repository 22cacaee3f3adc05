"""Which paths name a GGUF file, the parts that it may be split into, and pointers of Git LFS. Imports nothing large."""

import re
from pathlib import Path

from attend.model.errors import CheckpointError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 1000
LFS = b"version https://git-lfs.github.com/"


def is_gguf(path: Path) -> bool:
    """True if a checkpoint's path names a GGUF file, the first of its parts included."""
    return path.suffix == SUFFIX and not path.is_dir()


def part_paths(path: Path) -> list[Path]:
    """The file itself, or all NAME-00001-of-00003.gguf of its name, whether or not they are there. Raises CheckpointError."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if count > MAX_PARTS:
        raise CheckpointError(f"{path} has {count} parts by its name, but at most {MAX_PARTS} are read")
    return [path.with_name(f"{match['stem']}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)] if match else [path]


def split_files(path: Path) -> list[Path]:
    """The files of a GGUF checkpoint, all of which are there. Raises CheckpointError."""
    for each in part_paths(path):
        if not each.is_file():
            raise CheckpointError(f"{each} is missing")
    return part_paths(path)


def only_gguf(folder: Path) -> Path | None:
    """The first part of the GGUF checkpoint that a folder holds, where it holds exactly one, and no safetensors."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    found = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not path.name.startswith("mmproj")]
    first = [path for path in found if (match := _PART.fullmatch(path.name)) is None or int(match["number"]) == 1]
    return first[0] if len(first) == 1 else None


def lfs_advice(path: Path) -> str:
    """The end of a message about a file that Git LFS has left a pointer in place of; else empty."""
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS)) == LFS
    return "; it is a pointer of Git LFS: git lfs pull fetches the file" if is_pointer else ""
