"""The engine's fingerprint: what answers depend on beside requests. A client resumes an answer only under an equal one."""

import hashlib
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from attend.model.config import ModelConfig
from attend.model.gguf.paths import is_gguf, split_files
from attend.model.net.native.library import library_name
from attend.model.net.rope import frequencies_of

WHOLE = 64 << 20
"""A file of at most so many bytes is read whole."""
HEAD, SAMPLE, EVERY = 1 << 20, 1 << 12, 1 << 20
"""Bytes of a larger file that are read: its first, and so many in each so many."""


def own_version() -> str:
    """Version of the installed package, or a fixed text where a source tree runs without being installed."""
    try:
        return version("attend-server")
    except PackageNotFoundError:
        return "a tree that is not installed"


def processor(device: str) -> str:
    """The GPU and the versions of CUDA and Triton, or the CPU's vector instructions: others may sum in another order."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()} CUDA {torch.version.cuda} Triton {_triton()}"
    return f"{device} {torch.backends.cpu.get_cpu_capability()} {_native()}"


def _native() -> str:
    """The native decoder's name, which changes with its source."""
    try:
        return library_name()
    except OSError:
        return "none"


def _triton() -> str:
    """Triton's version, "none" where it is not installed: it comes with the wheels of torch for CUDA."""
    return version("triton") if find_spec("triton") is not None else "none"


def ropes(config: ModelConfig, context: int) -> str:
    """What the rotary embeddings of so many positions turn by: of some kinds of scaling it depends on their number."""
    digest = hashlib.sha256()
    for rope in config.ropes:
        frequencies, factor = frequencies_of(rope, context)
        digest.update(frequencies.numpy().tobytes() + f" {factor}".encode())
    return digest.hexdigest()[:16]


def fingerprint(folder: Path, setup: str) -> str:
    """Changes whenever answers might: weights and JSON (size and samples of each), set-up and versions."""
    digest = hashlib.sha256(f"{setup} {torch.__version__} {own_version()}".encode())
    for path in split_files(folder) if is_gguf(folder) else sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start, count in _samples(size):
                file.seek(start, os.SEEK_SET)
                digest.update(file.read(count))
    return "fp_" + digest.hexdigest()[:16]


def _samples(size: int) -> Iterator[tuple[int, int]]:
    """(start, count) of what is read of a file: all of a small one, else the head and a little of each matrix."""
    yield 0, WHOLE if size <= WHOLE else HEAD
    if size > WHOLE:
        yield from ((start, SAMPLE) for start in range(HEAD, size, EVERY))
        yield max(0, size - SAMPLE), SAMPLE
