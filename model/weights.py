"""Which files of a checkpoint folder hold its weights. Imports no torch and reads no tensor.

A folder's weights are read from safetensors only, and a GGUF file stands for a folder. A folder's files lie in it: names and
links that lead out of it are refused.
"""

import json
import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError
from attend.model.gguf.paths import SUFFIX, is_gguf, lfs_advice

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
SHOWN = 5
"""How many files one message names at most."""
PICKLES = (".bin", ".pt", ".pth")
NO_WEIGHTS = ("optimizer", "rng_state", "scheduler", "scaler", "training_args")
"""How the names of pickles begin that training leaves beside the weights."""
MAX_JSON = 25_000_000
"""Bytes of a JSON file, or of a safetensors header: the index of a model of 90,000 tensors has 9 million."""
TAKEN = f"give a checkpoint folder with config.json in it, a {SUFFIX} file, or hf://ORG/NAME"
READ = (".json", ".jinja", ".safetensors", SUFFIX)
"""Endings of the files that are read."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder. Raises CheckpointError."""
    document = read_any_json(folder, name)
    if not isinstance(document, dict):
        raise CheckpointError(f"{folder / name} must hold a JSON object")
    return document


def read_any_json(folder: Path, name: str) -> Any:
    """What a JSON file of the folder holds. Raises CheckpointError."""
    path = folder / name
    if is_gguf(folder):
        from attend.model.gguf.documents import json_file  # it needs numpy, and a folder does not

        return json_file(folder, name)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: {TAKEN}")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing{one_gguf(folder, [each.name for each in folder.iterdir()])}")
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, but at most {MAX_JSON} are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by the folder's index; None where there is no index. Raises CheckpointError."""
    path = folder / INDEX
    if not path.is_file():
        return None
    table = read_json(folder, INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{path} has no weight_map from the names of tensors to those of files")
    for name in set(table.values()):
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {name!r}, which is no safetensors file in the folder itself")
    return table


def weight_names(folder: Path, there: Collection[str]) -> list[str]:
    """The names of the safetensors files that hold the weights; some of them may not be among the files that are `there`.

    model.safetensors, whatever lies beside it, as `transformers` takes it; else the files of the index; else the shards, where
    those that are there are all of one set. Raises CheckpointError.
    """
    if WHOLE in there:
        return [WHOLE]
    table = read_index(folder)
    if table is not None:
        return sorted(set(table.values()))
    shards = {name: match for name in there if (match := SHARD.fullmatch(name))}
    counts = {int(match[2]) for match in shards.values()}
    if len(counts) == 1 and sorted(int(match[1]) for match in shards.values()) == [*range(1, max(counts) + 1)]:
        return sorted(shards)
    return [WHOLE]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, all of which are there. Raises CheckpointError."""
    there = _files(folder)
    names = weight_names(folder, there)
    for name in names:
        if name not in there:
            raise CheckpointError(f"{folder / name} is missing{way_out(folder, there)}")
    return [folder / name for name in names]


def passed_over(folder: Path) -> str | None:
    """What of the folder's weights is not read, since others are: a sentence for the log; None where all is read."""
    there = _files(folder)
    read = weight_names(folder, there)
    unread = sorted(name for name in there if name.endswith(".safetensors") and name not in read)
    if INDEX in there and WHOLE in read:
        unread.insert(0, INDEX)
    return f"{_few(read)} read, {_few(unread)} ignored" if unread else None


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def _few(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "") + (" is" if len(names) == 1 else " are")


def way_out(folder: Path, names: Collection[str]) -> str:
    """What weights there are among `names` that Attend does not read: the end of a sentence, or nothing."""
    if pickles := sorted(name for name in names if name.endswith(PICKLES) and not name.startswith(NO_WEIGHTS)):
        return f"; {pickles[0]} is a pickle, which Attend never opens: `save_pretrained` of transformers writes safetensors"
    if ggufs := one_gguf(folder, names):
        return ggufs
    others = sorted(name for name in names if name.endswith(".safetensors"))
    return f"; {_few(others)} there, but not all shards of a set under the names of the Hugging Face layout" if others else ""


def one_gguf(folder: Path, names: Collection[str]) -> str:
    """The end of a message: which of several GGUF files is to be named; empty where there are none."""
    ggufs = sorted(name for name in names if name.endswith(SUFFIX))
    return f"; name one of its GGUF files, as in {shlex.quote(str(folder / ggufs[0]))}" if ggufs else ""


def check_links(folder: Path) -> None:
    """Raise CheckpointError where a file that is read is a link out of the folder.

    Links in a snapshot of huggingface_hub's cache lead to the blobs of its repository, or to those that repositories share.
    """
    if is_gguf(folder):
        return
    home = folder.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        repository = home.parent.parent
        homes += [repository / "blobs", repository.parent / "blobs"]
    for path in sorted(folder.iterdir()):
        if path.suffix in READ and path.is_symlink():
            target = path.resolve()
            if not any(target.is_relative_to(each) for each in homes):
                raise CheckpointError(f"{path} is a link to {target}, outside the folder: copy the file into it")


def check_header(path: Path) -> None:
    """Raise CheckpointError where a safetensors file has a header that takes too long to read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if MAX_JSON < size < path.stat().st_size:
        raise CheckpointError(f"{path} has a header of {size} bytes, but at most {MAX_JSON} are read")


def open_safetensors(path: Path, framework: str = "pt") -> Any:
    """A safetensors file, whose header has been read. Raises CheckpointError where it is damaged, or cut off."""
    from safetensors import SafetensorError, safe_open  # where only names are read, it is not needed

    try:
        check_header(path)  # and safe_open calls a file that it may not read a missing one
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return safe_open(str(path), framework=framework, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}{lfs_advice(path)}") from error
