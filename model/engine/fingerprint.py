"""The engine's fingerprint: what answers depend on beside requests. A client resumes an answer only under an equal one."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from attend.model.config import ModelConfig
from attend.model.gguf.paths import is_gguf, split_files
from attend.model.net.native.library import library_name
from attend.model.net.rope import frequencies_of
from attend.model.weights import weight_files

PART, READ = 64 << 20, 1 << 20
"""Bytes of a file that one thread reads, and of these at once."""


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
    """Changes whenever answers might: every byte of weights and JSON, set-up and versions. A copy elsewhere has the same."""
    if is_gguf(folder):
        paths = split_files(folder)
    else:
        paths = [*(weight_files(folder) if any(folder.glob("*.safetensors")) else ()), *sorted(folder.glob("*.json"))]
    parts = [(path, start) for path in paths for start in range(0, max(1, path.stat().st_size), PART)]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, parts))
    digest = hashlib.sha256(f"{setup} {torch.__version__} {own_version()}".encode())
    for (path, start), part in zip(parts, digests, strict=True):
        digest.update(f"{path.name} {start} {part}".encode())
    return "fp_" + digest.hexdigest()[:16]


def _digest(part: tuple[Path, int]) -> str:
    """Of the bytes of a part of a file; other threads run meanwhile."""
    path, start = part
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ))
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(0, PART, READ):
            digest.update(buffer[: file.readinto(buffer)])
    return digest.hexdigest()
