"""`attend pull`: a checkpoint of the hub, downloaded before it is needed."""

import os
import shlex
import shutil
from pathlib import Path

from attend.model.errors import CheckpointError, SettingError
from attend.model.gguf.paths import SUFFIX, part_paths
from attend.service.runtime import hub
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings
from attend.service.values import HUB


def pull(settings: Settings, target: Path | None) -> None:
    """Download what `model` names into the cache of the hub, and with `target` put it into that folder; print where it is.

    Raises SettingError or CheckpointError.
    """
    if not settings.model.startswith(HUB):
        raise SettingError(f"{settings.model} is here already: `attend pull` takes {HUB}ORG/NAME")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print_line(line)

    place = hub.fetch_model(settings.model, say)
    if not any(line.startswith("Downloaded") for line in said):
        print_line(f"{settings.model} was downloaded before: nothing is missing")
    served = settings.model if target is None else str(place := copy_files(place, target))
    print(place)
    print_line(f"To serve it: attend serve {shlex.quote(served)}")


def copy_files(place: Path, target: Path) -> Path:
    """A folder of the cache, or a GGUF file with its parts, as files in another folder, which is whole as soon as it is there.

    Weights are hard links where both are on one file system: they take their space once. Raises CheckpointError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock")
        with hub.hold_lock(lock, lambda: print_line(f"Another process is writing {target}: waiting for it")):
            _copy(place, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}; {place} has what was downloaded") from error
    return target if place.is_dir() else target / place.name


def _copy(place: Path, target: Path) -> None:
    """A new folder appears when all its files are there; in one that was there before, each file does."""
    fresh = not target.exists()
    folder = target.with_name(f".{target.name}.partial") if fresh else target
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for path in place.rglob("*") if place.is_dir() else part_paths(place):
        if path.is_file():
            new = folder / path.relative_to(place if place.is_dir() else place.parent)
            new.parent.mkdir(parents=True, exist_ok=True)
            _put_file(path, new)
    if fresh:
        folder.rename(target)


def _put_file(path: Path, new: Path) -> None:
    if new.exists() and new.samefile(path):
        return
    whole = new.with_name(f".{new.name}.partial")
    whole.unlink(missing_ok=True)
    try:
        if not path.name.endswith((SUFFIX, ".safetensors")):  # somebody may edit it, and means this copy
            raise OSError
        os.link(path.resolve(), whole)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(path, whole)
    whole.replace(new)
