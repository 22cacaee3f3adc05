"""The engine's fingerprint: what answers depend on beside requests. A client resumes an answer only under an equal one."""

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from attend.model.config import ModelConfig
from attend.model.gguf.paths import is_gguf, part_paths, split_files
from attend.model.net.native.library import library_name
from attend.model.net.rope import frequencies_of
from attend.model.weights import weight_files

PART, READ = 64 << 20, 1 << 20
"""Bytes of a file that one thread reads, and of these those that share a checksum."""


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


def fingerprint(folder: Path, setup: str, digest: str | None = None) -> str:
    """Changes whenever answers might: weights and JSON (`digest`, if they have been read), set-up and versions."""
    digest = weights_digest(folder) if digest is None else digest
    return "fp_" + hashlib.sha256(f"{setup} {torch.__version__} {own_version()} {digest}".encode()).hexdigest()[:16]


def weights_digest(folder: Path) -> str:
    """Of every byte of weights and JSON. A copy elsewhere has the same.

    Each MiB has a CRC-32, in a third of the time of a SHA-256. No change within four bytes keeps it, any other one in 2**32.
    """
    parts = [(path, start) for path in _files(folder) for start in range(0, max(1, path.stat().st_size), PART)]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, parts))
    digest = hashlib.sha256()
    for (path, start), part in zip(parts, digests, strict=True):
        digest.update(f"{path.name} {start} {part}".encode())
    return digest.hexdigest()[:16]


def stamps(folder: Path) -> list[tuple[str, int, int, int]]:
    """What differs once a file that may be read was replaced or written."""
    paths = part_paths(folder) if is_gguf(folder) else sorted((*folder.glob("*.safetensors"), *folder.glob("*.json")))
    found = [(path.name, path.stat()) for path in paths if path.is_file()]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _files(folder: Path) -> list[Path]:
    if is_gguf(folder):
        return split_files(folder)
    weights = weight_files(folder) if any(folder.glob("*.safetensors")) else []
    return [*weights, *sorted(path for path in folder.glob("*.json") if path.is_file())]


def _digest(part: tuple[Path, int]) -> str:
    """Of the checksums of a part of a file; other threads run meanwhile."""
    path, start = part
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ))
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(0, PART, READ):
            count = file.readinto(buffer)
            digest.update(b"%d %d " % (count, zlib.crc32(buffer[:count])))
    return digest.hexdigest()
