"""The files of an image without building it: what COPY takes of the tree, and of the packages here those that it installs."""

import fnmatch
import re
import shutil
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.deploy.manifests import ROOT
from tests.deploy.test_image import instructions


def left_out(folder: str, names: list[str]) -> set[str]:
    """Those of a folder's names that .dockerignore leaves out."""
    lines = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#", "!") and line != "*"
    ]
    anywhere = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    here = Path(folder).relative_to(ROOT)
    return {name for name in names if str(here / name) in lines or any(fnmatch.fnmatch(name, each) for each in anywhere)}


def lay_out(stage: str, root: Path) -> None:
    """Copy what the COPY lines of a stage take of the tree to where they put it, links as links, below `root`."""
    for line in instructions("COPY", stage):  # type: ignore[no-untyped-call]  # of a test
        *sources, target = line.split()
        if sources[0].startswith("--from="):
            continue
        place = root / target.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, place, symlinks=True, ignore=left_out, dirs_exist_ok=True)
            else:
                shutil.copy2(source, place)


def packages(*names: str) -> dict[str, Distribution]:
    """These packages and all that they need, as installed here, by name."""
    found: dict[str, Distribution] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        one = todo.pop()
        name = f"{re.sub('[-_.]+', '-', one.name).lower()}[{','.join(sorted(one.extras))}]"
        if name in found:
            continue
        found[name] = distribution(one.name)
        needs = map(Requirement, found[name].requires or ())
        extras = ("", *one.extras)
        todo += [each for each in needs if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)]
    return found


def site(folder: Path, *names: str) -> Path:
    """A folder for PYTHONPATH that has these packages alone."""
    folder.mkdir()
    for each in packages(*names).values():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(each.locate_file(top))))
    return folder
