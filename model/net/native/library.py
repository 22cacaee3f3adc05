"""The native decoder as a shared library: built once at set-up by `python -m attend.model.net.native`, loaded if it is there.

Nothing needs it: without a compiler, or on another CPU, the torch path serves.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
"""Sums keep the order in which they are written, infinities and NaN their meaning."""
VARIANTS = ("portable", "avx2", "avx2-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx")
"""The last one that a CPU has is its best. With AVX-512-BF16 and with AMX quantised weights use VNNI, too."""

_P, _I = ctypes.c_void_p, ctypes.c_int64
_ROWS = (_P, _P, _I, _P, _I)
SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "attend_has": ((ctypes.c_int,), ctypes.c_int),
    "attend_best": ((), ctypes.c_int),
    "attend_choose": ((ctypes.c_int,), None),
    "attend_new": ((_P, _P, _P, _P), _P),
    "attend_pack": ((_P, _I, _P, _P), ctypes.c_int),
    "attend_pack_codes": ((_P, _I, _I, _P, _P, _P, _P, _P, _P), ctypes.c_int),
    "attend_pack_blocks": ((_P, _I, _I, ctypes.c_int, _P, _P, _P), ctypes.c_int),
    "attend_trim": ((), None),
    "attend_unpack": ((_P, _I, _I, _I, _P), None),
    "attend_free": ((_P,), None),
    "attend_adapter_new": ((_P,), _P),
    "attend_adapter_set": ((_P, _P, _I, _P, _P, _I, _I, _P, _I), ctypes.c_int),
    "attend_adapter_free": ((_P,), None),
    "attend_adapt": ((_P, _P, _I, _I), ctypes.c_int),
    "attend_step": ((_P, _P, _P, _P, _I, _P, _P, _I, ctypes.c_int, _P, *_ROWS, _P, _P, _P, _P, _P), ctypes.c_int),
    "attend_logits": ((_P, _P, _I, _P), ctypes.c_int),
    "attend_draw": ((_P, _I, _I, _P, _P), None),
    "attend_layer": ((_P, _P, _I, _I, _I, _I, _P, _P, _I, ctypes.c_int, *_ROWS, _P, _P, _P), None),
}


def library_path() -> Path:
    """Where the library of this source belongs: beside it, under a name that changes with it."""
    texts = [path.read_bytes() for path in sorted(SOURCE.iterdir())]
    digest = hashlib.sha256(b"".join(texts) + " ".join(FLAGS).encode()).hexdigest()[:12]
    return SOURCE.with_name(f"decoder-{digest}.so")


def find_compiler() -> str | None:
    """A C++ compiler of this machine."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def build(compiler: str) -> Path:
    """Compile the decoder; returns the library. Raises CalledProcessError with the compiler's words, or OSError."""
    path = library_path()
    unfinished = path.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, str(SOURCE / "decoder.cpp"), "-o", str(unfinished)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    unfinished.rename(path)  # whole or not at all
    for old in path.parent.glob("*.so"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


@cache
def load() -> ctypes.CDLL | None:
    """The library with the best variant chosen, or None where it was not built or cannot be loaded. torch must be imported."""
    try:
        return opened(library_path())
    except OSError:  # also where the source, which names the library, is missing
        return None


def opened(path: Path) -> ctypes.CDLL:
    """A library of this source with the best variant chosen. Raises OSError where it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    library.attend_choose(library.attend_best())
    return library


def variant() -> str:
    """The best variant that this CPU has; empty without a library."""
    library = load()
    return "" if library is None else VARIANTS[library.attend_best()]
