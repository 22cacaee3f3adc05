"""What answers depend on beside their requests, as a short name: a client resumes an answer only where it is the same."""

import hashlib
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from attend.model.gguf.places import is_gguf, parts
from attend.model.net.native.library import library_name

SAMPLED = 1 << 20
"""Bytes of a file's head, middle and tail that are read."""


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
    """Its version; it comes with the wheels of torch for CUDA."""
    return version("triton") if find_spec("triton") is not None else "none"


def fingerprint(folder: Path, setup: str) -> str:
    """Changes whenever answers might: weights and JSON (size, head, middle and tail of each), set-up and version."""
    digest = hashlib.sha256(f"{setup} {torch.__version__}".encode())
    for path in parts(folder) if is_gguf(folder) else sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLED)):
                file.seek(start, os.SEEK_SET)
                digest.update(file.read(SAMPLED))
    return "fp_" + digest.hexdigest()[:16]
