"""`attend pull`: a checkpoint of the hub, downloaded before it is needed."""

import shlex
import shutil
from pathlib import Path

from attend.model.errors import CheckpointError, SettingError
from attend.model.gguf.places import part_paths
from attend.service.runtime import hub
from attend.service.runtime.lines import tell
from attend.service.settings import HUB, Settings


def pull(settings: Settings, target: Path | None) -> None:
    """Download what `model` names into the cache of the hub, and with `target` copy it into that folder; print where it is.

    Raises SettingError or CheckpointError.
    """
    if not settings.model.startswith(HUB):
        raise SettingError(f"{settings.model} is here already: `attend pull` takes {HUB}ORG/NAME")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        tell(line)

    place = hub.fetch(settings.model, say)
    if not any(line.startswith("Downloaded") for line in said):
        tell(f"{settings.model} was downloaded before: nothing is missing")
    served = settings.model if target is None else str(place := copied(place, target))
    print(place)
    tell(f"To serve it: attend serve {shlex.quote(served)}")


def copied(place: Path, target: Path) -> Path:
    """A folder of the cache, or a GGUF file with its parts, as files of their own in another folder. Raises CheckpointError."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in place.iterdir() if place.is_dir() else part_paths(place):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}; {place} has what was downloaded") from error
    return target if place.is_dir() else target / place.name
