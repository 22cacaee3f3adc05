"""What is here, and what it does: device.py here DEVICE, or device.py speed DEVICE SIZE. Prints lines of JSON."""

import importlib
import json
import os
import platform
import sys
import threading
from statistics import median
from types import TracebackType
from typing import Any

from attend.model.machine import ask_driver

PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "pytest", "hypothesis")
ASKED = {"clocks.sm": "MHz", "clocks.mem": "MHz", "power.draw": "W", "temperature.gpu": "°C"}
"""What is asked of nvidia-smi while something is measured."""
EVERY = 0.2
"""Seconds between two looks."""


def versions() -> dict[str, str]:
    """Of the packages, as they say themselves, or what one raises as it is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except Exception as error:  # a library that does not load raises what it likes
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def here(device: str) -> None:
    """Each line is printed at once: whatever comes next may hang."""
    driver = ("name", "driver_version", "memory.total", "compute_cap")
    about: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    print(json.dumps(about | dict(zip(driver, ask_driver(driver), strict=False))), flush=True)
    print(json.dumps(versions()), flush=True)
    if device == "cuda":
        from attend.model.devices import gpu

        print(json.dumps(gpu()), flush=True)


class Clocks:
    """What nvidia-smi says while its block runs: `told` has the lowest, the median and the highest of each of ASKED.

    A figure that other clocks made cannot be compared. Where `watching` is false, and without nvidia-smi, nothing is told.
    """

    def __init__(self, watching: bool = True) -> None:
        self.told: dict[str, list[float]] = {}
        self._seen: list[list[float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if watching else None

    def __enter__(self) -> "Clocks":
        if self._thread:
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._seen.append([float(each) for each in ask_driver(tuple(ASKED), units=False)])
            except ValueError:  # a driver that does not tell
                return
            self._over.wait(EVERY)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(timeout=30)
        for name, values in zip(ASKED, zip(*(each for each in self._seen if each), strict=False), strict=False):
            self.told[name] = [min(values), median(values), max(values)]

    @property
    def summary(self) -> str:
        """For people: of each the median, with the lowest and highest where they differ."""
        return ", ".join(
            f"{name} {middle:g} {ASKED[name]}" + ("" if low == high else f" ({low:g} to {high:g})")
            for name, (low, middle, high) in self.told.items()
        )


def speed(device: str, size: int) -> None:
    """Bytes read and written, products in bfloat16 of square matrices of so many rows, and the clocks meanwhile."""
    import torch

    from attend.model.devices import rates

    facts: dict[str, Any] = dict(rates(device, size))
    if device == "cuda":
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        with Clocks() as clocks:
            for _ in range(round(facts["flops"] / size**3)):  # two seconds of work, while the driver is asked
                a @ a
            torch.cuda.synchronize()
        facts |= {"clocks": clocks.told, "clocks shown": clocks.summary}
    print(json.dumps(facts))


if __name__ == "__main__":
    if sys.argv[1] == "here":
        here(sys.argv[2])
    else:
        speed(sys.argv[2], int(sys.argv[3]))
