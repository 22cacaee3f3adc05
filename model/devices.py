"""Choice of device and dtype, and what the device is. No GPU that torch cannot use is passed over in silence.

Not yet run on a GPU.
"""

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attend.model.errors import SettingError
from attend.model.machine import ROOT, instruction_sets, processor_name

BFLOAT16 = (8, 0)
"""The least compute capability whose matrix units multiply bfloat16: Ampere. Triton's kernels are compiled for it and later."""
OVERFLOWS = frozenset({"gemma2", "gemma3_text", "gemma3", "glm4"})
"""Families whose hidden states leave the range of float16, so that their scores are not finite."""
HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that name no GPU."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str, root: Path = ROOT) -> str:
    """`auto` is CUDA where torch can use it; `cuda` never falls back to the CPU: SettingError with torch's reason."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise SettingError(f"device is cuda, but this process sees no CUDA device: {why_no_cuda(root)}")
    return "cuda"


def gpu_dtype(dtype: str, family: str = "") -> torch.dtype:
    """`auto` is bfloat16, and float16 on a GPU without it. SettingError where it cannot be computed, or overflows."""
    if (found := capability()) >= BFLOAT16:
        return DTYPES["bfloat16" if dtype == "auto" else dtype]
    lacking = f"this GPU has compute capability {capability_text(found)}, and bfloat16 needs {capability_text(BFLOAT16)}"
    if dtype == "bfloat16":
        raise SettingError(f"dtype is bfloat16, but {lacking}: use float16 or float32")
    if dtype == "auto" and family in OVERFLOWS:
        raise SettingError(f"dtype is auto, but {lacking}, and {family} overflows float16: use dtype = float32")
    return DTYPES["float16" if dtype == "auto" else dtype]


def capability() -> tuple[int, int]:
    """Compute capability of the first GPU, as (8, 0); without a GPU, BFLOAT16: for kernels that are compiled or tried there."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else BFLOAT16


def capability_text(capability: tuple[int, int]) -> str:
    """A compute capability in words: 8.0."""
    return f"{capability[0]}.{capability[1]}"


def nvidia_here(root: Path = ROOT) -> str:
    """The path by which the system shows an NVIDIA GPU or its driver; empty where it shows none."""
    found = [*sorted((root / "dev").glob("nvidia[0-9]*")), root / "proc/driver/nvidia/version"]
    return next((f"/{path.relative_to(root)}" for path in found if path.exists()), "")


def unused_gpu(root: Path = ROOT) -> str:
    """Why torch cannot use the GPU of this machine, and what to do; empty where it can, or where there is none."""
    place = "" if torch.cuda.is_available() else nvidia_here(root)
    return place and f"an NVIDIA GPU is here ({place}), and torch cannot use it: {why_no_cuda(root)}"


def why_no_cuda(root: Path = ROOT) -> str:
    """Why torch uses no GPU here, in its own words, and what to do."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build with it (pip install torch, without +cpu)"
    if not nvidia_here(root):
        return "no NVIDIA driver is here; install it, or start the container with its GPU (--gpus all)"
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()) in HIDING:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r} and hides it; Ray does so where it has no GPUs (ray start --num-gpus)"
    words = _words_of_torch()
    if "driver" in words and "old" in words:
        return f"{words}; update the driver, or install a torch that was built for CUDA {_driver_cuda(words)}"
    return f"{words}; nvidia-smi must work here, in the container too"


def _words_of_torch() -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # RuntimeError, AssertionError, DeferredCudaCallError
            return _sentence(str(error))
    return _sentence(str(caught[0].message)) if caught else "it finds no device"


def _sentence(text: str) -> str:
    """The first sentence of what a library says, on one line."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def _driver_cuda(words: str) -> str:
    """The CUDA of a driver, as torch numbers it: found version 12040 is 12.4."""
    digits = words.partition("found version ")[2].partition(")")[0]
    return f"{int(digits) // 1000}.{int(digits) % 1000 // 10}, as the driver has it" if digits.isdigit() else "of the driver"


def name_of_device(device: str) -> str:
    """The GPU's name, or the processor's with its best instruction set, for people."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    best = next(iter(instruction_sets()), "")
    return f"{processor_name()}, {best}" if best else processor_name()


def gpu() -> dict[str, Any]:
    """What torch says of the first GPU, or why it sees none."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        about: Any = torch.cuda.get_device_properties(0)  # torch's types lack some
    except Exception as error:  # RuntimeError, AssertionError, or DeferredCudaCallError
        return {"cuda": torch.version.cuda, "no device": str(error).splitlines()[0]}
    return {
        "cuda": torch.version.cuda,
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory": about.total_memory,
        "processors": about.multi_processor_count,
        "shared_memory": about.shared_memory_per_block_optin,
        "devices": torch.cuda.device_count(),
    }


def read_rate() -> float:
    """Bytes that this CPU reads from memory in a second, which is more than it copies."""
    numbers = torch.ones(1 << 25, dtype=torch.int64)
    found = []
    for _ in range(4):
        begun = time.perf_counter()
        numbers.amax()
        found.append(time.perf_counter() - begun)
    return numbers.nbytes / min(found)


TURNS, ROUNDS = 5, 3
"""Rounds that are timed, after three that are not: the fastest one counts, since other processes may use the cores."""


def rates(device: str, size: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """What a device does in a second: `bytes` that a copy reads and writes, and `flops` of a product of square matrices, of
    `size` rows. Of random numbers: ones take less power, and so are faster.
    """
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        wait()
        found = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(TURNS):
                work()
            wait()
            found.append(time.perf_counter() - begun)
        return min(found) / TURNS

    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    many = torch.randn(16 * size * size, device=device, dtype=dtype)
    copy = torch.empty_like(many)
    return {"bytes": 2 * many.nbytes / seconds(lambda: copy.copy_(many)), "flops": 2 * size**3 / seconds(lambda: a @ b)}
