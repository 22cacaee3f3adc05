"""The native decoder on arm64, by an emulator: small decoders (decoders.cpp) compute there what they compute here.

An emulator says what instructions compute, and nothing of their speed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from attend.model.net.native import library
from attend.model.net.native.build import find_compiler

SOURCE = Path(__file__).with_name("decoders.cpp")
COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
FLAGS_OF_ARM = [flag for flag in library.FLAGS if flag not in library.MORE_FLAGS.get(platform.machine(), [])]
FLAGS_OF_ARM += library.MORE_FLAGS["aarch64"]
CPUS = {"cortex-a72": 1, "neoverse-n1": 2, "max": 3}
"""What is emulated, and how many instruction sets of the library it has."""
pytestmark = [
    pytest.mark.timeout(600),  # compilers and an emulator, on a busy machine
    pytest.mark.skipif(platform.machine() != "x86_64", reason="this CPU has no instructions of x86-64 to compare with"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler for arm64 ({COMPILER})"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no emulator of arm64 ({EMULATOR})"),
    pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built here"),
]


class Found(NamedTuple):
    """A line of decoders.cpp."""

    digest: str
    distance: float
    alone: bool


def run(command: Sequence[str | Path], libraries: Path) -> dict[tuple[str, int], Found]:
    """By model and instruction set."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "OMP_NUM_THREADS": "2"}
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    found = {}
    for line in lines:
        model, _, rest = line.partition(": ")
        number, digest, distance, alone = rest.split(" ", 3)
        found[model, int(number)] = Found(digest, float(distance), alone == "alone")
    return found


def build(compiler: str, flags: Sequence[str], built: Path, to: Path) -> None:
    program = [flag for flag in flags if flag not in ("-O3", "-shared", "-fPIC")]
    subprocess.run(
        [compiler, *program, "-O1", "-w", f"-I{library.SOURCE}", SOURCE, f"-L{built.parent}", f"-l:{built.name}", "-o", to],
        check=True,
    )


@pytest.fixture(scope="module")
def programs(pytestconfig: pytest.Config) -> Path:
    """A folder with the library for arm64, and decoders.cpp for this machine and for arm64: built once for the same sources."""
    here = Path(library.load_library()._name)
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS_OF_ARM).encode()).hexdigest()[:12]
    parent = pytestconfig.cache.mkdir("arm64")
    folder = parent / f"{here.stem}-{digest}"
    with FileLock(parent / "lock"):
        if not folder.exists():
            for old in parent.glob("*-*"):
                shutil.rmtree(old)
            unfinished = parent / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            built = unfinished / "decoder.so"
            subprocess.run([COMPILER, *FLAGS_OF_ARM, library.SOURCE / "decoder.cpp", "-o", built], check=True)
            build(COMPILER, FLAGS_OF_ARM, built, unfinished / "arm64")
            build(find_compiler(), library.FLAGS, here, unfinished / "here")
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(programs) -> dict[tuple[str, int], Found]:
    return run([programs / "here"], Path(library.load_library()._name).parent)


@pytest.fixture(scope="module", params=CPUS)
def found(request, programs) -> dict[tuple[str, int], Found]:
    found = run([EMULATOR, "-L", ROOT, "-cpu", request.param, programs / "arm64"], programs)
    assert {number for _, number in found} == set(range(CPUS[request.param]))
    return found


def test_the_portable_path_on_arm64_has_the_bits_of_that_on_x86(wanted, found):
    of_portable = {key: each.digest for key, each in wanted.items() if key[1] == 0}
    assert of_portable == {key: each.digest for key, each in found.items() if key[1] == 0}
    assert len(set(of_portable.values())) == len(of_portable)


def test_other_instruction_sets_of_arm64_compute_the_same_up_to_rounding(found):
    """Activations in whole numbers may be rounded to the next one: those of x86 are as far from the portable path."""
    for (model, number), each in found.items():
        assert each.distance < (0.06 if "int" in model else 0.01), (model, number)


def test_a_request_has_the_same_bits_on_arm64_whatever_is_computed_beside_it(found):
    assert all(each.alone for each in found.values()), found
