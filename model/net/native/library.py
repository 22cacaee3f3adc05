"""The native kernels as a shared library: built once at set-up by `python -m model.net.native`, loaded if it is there.

Nothing needs it: without a compiler, or on another CPU, the torch path serves.
"""

import ctypes
import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"]
"""Sums may be split over vector lanes; infinities and NaN keep their meaning."""
VARIANTS = ("portable", "avx2", "avx512", "amx")
"""From the least to the most that a CPU must have."""

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "attend_norm": (_P, _P, _P, _P, _I, _I, _F),
    "attend_silu": (_P, _P, _I, _I),
    "attend_write": (_P, _I, _I, _I, _I, _P, _P, _I, _P, _P, _P, _P, _P, _P, _F),
    "attend_paged": (_P, _I, _I, _I, _P, _P, _I, _P, _P, _I, _P, _I, _P, _F),
    "attend_choose": (ctypes.c_int,),
}


def library_path() -> Path:
    """Where the library of this source belongs: beside it, under a name that changes with it."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    return SOURCE.with_name(f"kernels-{digest}.so")


def build(compiler: str) -> Path:
    """Compile the kernels; returns the library. Raises CalledProcessError with the compiler's words, or OSError."""
    path = library_path()
    unfinished = path.with_suffix(f".{os.getpid()}")
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], check=True, capture_output=True, text=True)
    for old in path.parent.glob("kernels-*.so"):
        old.unlink()
    unfinished.rename(path)  # whole or not at all
    return path


@cache
def load() -> ctypes.CDLL | None:
    """The library with the best variant chosen, or None where it was not built or cannot be loaded. torch must be imported."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError:  # also where the source, which names the library, is missing
        return None
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    library.attend_choose(library.attend_best())
    return library


def variant() -> str:
    """The best variant that this CPU has; empty without a library."""
    library = load()
    return "" if library is None else VARIANTS[library.attend_best()]
