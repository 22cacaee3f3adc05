"""Which device the engine runs on, and why a GPU of the machine is none."""

import logging
from pathlib import Path

import torch

from attend.model.errors import SettingError

DRIVER = Path("/dev/nvidiactl")
"""Is there where NVIDIA's driver has a GPU for this process."""
log = logging.getLogger("attend.engine")


def choose_device(wanted: str) -> str:
    """`auto` is CUDA where there is one; `cuda` never falls back to the CPU. Raises SettingError."""
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise SettingError(f"device is cuda, but this process sees no CUDA device: {why_not()}")
    if DRIVER.exists():
        log.warning("a GPU is here (%s), but torch cannot use it, and the CPU serves: %s", DRIVER, why_not())
    return "cpu"


def why_not() -> str:
    """What torch says of a CUDA that it cannot use, such as a driver that is too old; in one line."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].rstrip(".")
    return "no device is visible"
