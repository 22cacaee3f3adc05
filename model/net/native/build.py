"""Compiles the native decoder: beside its source at set-up, into a wheel, or once into the user's cache.

setup.py imports this module where nothing but the standard library is installed.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from attend.model.net.native.library import FLAGS, SOURCE, cache_folder, cached_path, library_name, library_path

KEPT = 3
"""Libraries in the cache: of this version, and of others that are installed elsewhere."""
SECONDS = 40
"""Time limit of a build, for a slow core: g++ 12 takes 33 s on an AMD EPYC (Zen 4)."""


def find_compiler() -> str | None:
    """Path of a C++ compiler of this machine, None where there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def build_library(compiler: str, folder: Path, keep: int = 1) -> Path:
    """Compile the decoder into a folder, which keeps the newest `keep` libraries; returns this one.

    Raises CalledProcessError with the compiler's words, or OSError.
    """
    path = folder / library_name()
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        command = [compiler, *FLAGS, str(SOURCE / "decoder.cpp"), "-o", str(unfinished)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        unfinished.rename(path)  # whole or not at all
    finally:
        unfinished.unlink(missing_ok=True)
    others = sorted(set(folder.glob("decoder-*.so")) - {path}, key=lambda other: other.stat().st_mtime, reverse=True)
    for old in others[keep - 1 :]:
        old.unlink(missing_ok=True)
    return path


def absence() -> tuple[str, str]:
    """Why there is no library, as a word and a sentence that says what to do."""
    if find_compiler() is None:
        return "no_compiler", "it was not built: install g++, and start again"
    try:
        private_folder()
    except OSError as error:
        why = str(error) if error.strerror is None else f"{error.filename}: {error.strerror}"
        return "no_cache", f"it was not built: {why}; XDG_CACHE_HOME may name another folder"
    return "not_built", "it was not built: python -P -m attend.model.net.native builds it, or says why not"


def provide(say: Callable[[str], None]) -> None:
    """Have the library built into the user's cache if it is in neither place, with a line before and one after.

    Where that cannot be, what serves says so by `absence`. torch need not be imported.
    """
    compiler = find_compiler()
    if is_there() or compiler is None:
        return
    from filelock import FileLock

    try:
        folder = private_folder()
        with FileLock(folder / "lock"):
            if is_there():  # another process built it meanwhile
                return
            say(f"Building the native decoder, once: about {SECONDS} s ...")
            started = time.monotonic()
            path = build_library(compiler, folder, KEPT)
        say(f"Built {path} in {time.monotonic() - started:.0f} s")
    except subprocess.CalledProcessError as error:
        lines = (error.stderr.strip() or str(error)).splitlines()
        say(f"The native decoder cannot be built: {next((line for line in lines if 'error' in line), lines[0])}")
    except OSError:
        return  # `absence` has the sentence


def is_there() -> bool:
    """True if a library is there that this machine can load."""
    return any(_loads(path) for place in (library_path, cached_path) if (path := _path_if_file(place)) is not None)


def _path_if_file(place: Callable[[], Path]) -> Path | None:
    try:
        return path if (path := place()).is_file() else None
    except OSError:
        return None


def _loads(path: Path) -> bool:
    """Tried in a child: here it would load the system's OpenMP runtime before torch loads its own, which it also may lack."""
    command = [sys.executable, "-I", "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 or "libgomp" in done.stderr


def private_folder() -> Path:
    """The cache folder, made if need be. Raises OSError where it cannot be written to, or others can."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cached_path()
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} cannot be written to")
    return path.parent
