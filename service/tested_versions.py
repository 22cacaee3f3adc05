"""Installed packages whose versions Attend was not tested with: those outside the bounds of pyproject.toml."""

from functools import cache
from importlib.metadata import requires, version

from packaging.requirements import Requirement


@cache
def untested_packages() -> tuple[str, ...]:
    """A sentence for each of them. pip refuses such a set, unless it is told otherwise or a package is replaced later."""
    needed = [Requirement(line) for line in requires("attend-server") or ()]
    bounded = [each for each in needed if each.specifier and (each.marker is None or each.marker.evaluate())]
    return tuple(
        f"{each.name} {version(each.name)} is installed, and Attend was tested with {each.specifier}"
        for each in bounded
        if not each.specifier.contains(version(each.name), prereleases=True)
    )
