"""One instruction set of the native decoder after the other.

Of those that this CPU does not have a test runs the ones that its mark `by_loops` names: on a library of the same sources with
plain loops in place of the instructions (`stand_ins.h`).
"""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from attend.model.net.native import library

HEADER = Path(__file__).with_name("stand_ins.h")
FLAGS = ["-O1", "-fexpensive-optimizations", "-include", str(HEADER), f"-I{library.SOURCE}"]
"""Soon compiled, with products and sums rounded at once."""


@pytest.fixture(scope="session")
def stand_ins(pytestconfig: pytest.Config) -> ctypes.CDLL:
    """The library with loops in place of instructions. It is built once for the same sources."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = pytestconfig.cache.mkdir("stand_ins")
    digest = hashlib.sha256(HEADER.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    path = folder / f"{library.library_path().stem}-{digest}.so"
    with FileLock(folder / "lock"):  # workers share it
        if not path.exists():
            for old in folder.glob("*.so"):
                old.unlink()
            command = [compiler, *library.FLAGS, *FLAGS, str(library.SOURCE / "decoder.cpp"), "-o", str(folder / "unfinished")]
            subprocess.run(command, check=True)
            (folder / "unfinished").rename(path)
    return library.open_library(path)


@pytest.fixture(params=range(len(library.VARIANTS)), ids=library.VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """One variant after the other, as far as this CPU has them or loops stand in for them."""
    name, built = library.VARIANTS[request.param], library.load_library()
    if not built.attend_has(request.param):
        mark = request.node.get_closest_marker("by_loops")
        if mark is None or name not in mark.args:
            pytest.skip(f"this CPU has no {name}")
        built = request.getfixturevalue("stand_ins")
        monkeypatch.setattr(library, "load_library", lambda: built)
    built.attend_choose(request.param)
    yield name
    built.attend_choose(built.attend_best())
