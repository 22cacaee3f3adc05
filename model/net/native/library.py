"""The native decoder as a shared library: beside its source, as at set-up and in a wheel, or in the user's cache (`build.py`).

Nothing needs it: without a compiler, or on another CPU, the torch path serves.
"""

import ctypes
import hashlib
import os
import platform
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-pthread"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
"""Sums keep the order in which they are written, infinities and NaN their meaning."""
MORE_FLAGS = {"aarch64": ["-ffp-contract=off", "-fno-schedule-insns"]}
"""By machine. On arm64 the portable path rounds products before it adds them, as on x86-64, and so has the same bits. GCC 12
would order instructions so that it runs out of registers.
"""
FLAGS += MORE_FLAGS.get(platform.machine(), [])
VARIANTS_OF = {
    "x86_64": ("avx2", "avx2-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx"),
    "aarch64": ("neon-dotprod", "neon-i8mm-bf16"),
}
VARIANTS = ("portable", *VARIANTS_OF.get(platform.machine(), ()))
"""The last one that a CPU has is its best, but `avx512-bf16` of Intel. This one and `amx` use VNNI for quantised weights."""

_P, _I = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "attend_has": ((ctypes.c_int,), ctypes.c_int),
    "attend_best": ((), ctypes.c_int),
    "attend_choose": ((ctypes.c_int,), None),
    "attend_new": ((_P, _P, _P), _P),
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
    "attend_step": ((_P, _P, _P), ctypes.c_int),
    "attend_logits": ((_P, _P, _I, _P), ctypes.c_int),
    "attend_draw": ((_P, _I, _I, _P, _P), ctypes.c_int),
    "attend_score": ((_P, _I, _I, _P), None),
    "attend_layer": ((_P, _P, _I, _I, _I, _I, _P, _P, _I, ctypes.c_int, _P, _P, _I, _P, _P, _P, _P), None),
}


def library_path() -> Path:
    """Path of the library for this source, beside it: its name has the digest of the source."""
    return SOURCE.with_name(library_name())


def library_name() -> str:
    """The library's name, with a digest of its source and flags. Raises OSError where the source is missing."""
    texts = [path.read_bytes() for path in sorted(SOURCE.iterdir())]
    digest = hashlib.sha256(b"".join(texts) + " ".join(FLAGS).encode()).hexdigest()[:12]
    return f"decoder-{digest}.so"


def cache_folder() -> Path:
    """Where the library that was built for this user is kept. Raises OSError where its folder is not safe to load from."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "attend"
    except RuntimeError as error:
        raise OSError("this user has no home folder, and XDG_CACHE_HOME is not set") from error
    if not folder.is_absolute():
        raise OSError(f"{folder} is not absolute: set HOME or XDG_CACHE_HOME to an absolute path")
    return folder


def cached_path() -> Path:
    """The library in the user's cache, there or not. Raises OSError where another user could have put one there."""
    folder = cache_folder()
    own = folder.lstat()
    if own.st_uid != os.getuid() or not stat.S_ISDIR(own.st_mode) or own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} is not a folder that only this user can write to (chmod 700)")
    for place in {*folder.parents, *folder.resolve().parents}:
        about = place.stat()
        if about.st_uid not in (0, os.getuid()) or (about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX):
            raise OSError(f"other users could replace {folder}: {place} is another user's, or others can write to it")
    return folder / library_name()


@cache
def load_library() -> ctypes.CDLL | None:
    """The library with the best variant chosen, or None where it was not built or cannot be loaded. torch must be imported:
    the library then uses its OpenMP runtime (libgomp), and none is loaded beside that.
    """
    for place in (library_path, cached_path):
        with suppress(OSError):  # also where the source, which names the library, is missing
            return open_library(place())
    return None


def native() -> ctypes.CDLL:
    """The library, which must be there."""
    library = load_library()
    assert library is not None, "the native decoder is not built"
    return library


def check_memory(failed: int) -> None:
    """Raise MemoryError where a call says so."""
    if failed:
        raise MemoryError("out of memory: the native decoder's buffers of this step do not fit")


def open_library(path: Path) -> ctypes.CDLL:
    """A library of this source with the best variant chosen. Raises OSError where it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    library.attend_choose(library.attend_best())
    return library


def variant() -> str:
    """The best variant that this CPU has; empty without a library."""
    library = load_library()
    return "" if library is None else VARIANTS[library.attend_best()]
