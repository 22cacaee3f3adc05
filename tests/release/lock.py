"""Writes deploy/docker/requirements.txt: what the images install beside torch, each file by its SHA-256, for amd64 and arm64.

`python -m tests.release.lock` asks the package index that pip is configured for, in a minute; wheels are not downloaded. The
versions are those of constraints.txt. torch is left out: the images take other builds of it, from an index of PyTorch's own.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "deploy/docker/requirements.txt"
MACHINES = ("x86_64", "aarch64")
TAGS = (*(f"manylinux_2_{minor}" for minor in range(36, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1", "linux")
"""Those of wheels that run on the images' C library: Debian 12 has 2.36."""
HEAD = """\
# What the images install beside torch, by SHA-256: of each version the files for Linux on amd64 and arm64.
# Written by `python -m tests.release.lock`. .github/workflows/images.yaml gives it to the Dockerfile.
"""


def python_version() -> str:
    """The Python of the images, such as 3.11."""
    found = re.search(
        r"^ARG BASE=python:(3\.\d+)", (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found, "the Dockerfile names its Python in ARG BASE"
    return found[1]


def named() -> list[str]:
    """What the images ask for by name: Attend's dependencies, the packages for traces, and what torch needs on a CPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = [each for each in project["dependencies"] if not each.startswith("torch")]
    of_torch = [each for each in requires("torch") or [] if ";" not in each]  # what has a marker is for CUDA, or an extra
    return sorted({*ours, *project["optional-dependencies"]["otel"], *of_torch})


def resolved(machine: str) -> dict[str, tuple[str, str]]:
    """(version, SHA-256) of each package on such a machine, by its normalised name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_{machine}")]
        where = ["--target", folder, "--python-version", python_version(), "--only-binary=:all:", *platforms]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *where]
        command += ["--report", str(report), "-c", str(ROOT / "constraints.txt"), *named()]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(each["metadata"]["name"]): (
            each["metadata"]["version"],
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in found
    }


def locked(machines: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The text of the lock. A package has one hash where both machines take the same file."""
    lines = [HEAD.rstrip()]
    for name in sorted({name for packages in machines.values() for name in packages}):
        files = [packages[name] for packages in machines.values() if name in packages]
        [version] = {version for version, _ in files}
        lines.append(
            f"{name}=={version}" + "".join(f" --hash=sha256:{digest}" for digest in sorted({each for _, each in files}))
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LOCK.write_text(locked({machine: resolved(machine) for machine in MACHINES}), encoding="utf-8")
