"""Clocks, power and temperature of the GPU while something is measured, as the driver tells them: by pynvml (the package
nvidia-ml-py) where it is installed, else by nvidia-smi. Without either a figure says so, and stands without them.
"""

import threading
from collections.abc import Callable
from statistics import median
from types import TracebackType
from typing import Any

from attend.model.machine import ask_driver, first_gpu

Look = Callable[[], tuple[float, ...]]
"""What is seen at one moment: see UNITS."""
UNITS = {"sm": "MHz", "memory": "MHz", "power": "W", "temperature": "°C"}
ASKED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""The same, in the words of nvidia-smi."""
EVERY = 0.2
"""Seconds between two looks."""
NOBODY = "neither nvidia-ml-py nor nvidia-smi tells them"


def by_nvml() -> Look:
    """Raises ImportError, or what NVML raises, where it is not here."""
    import pynvml

    pynvml.nvmlInit()
    name = first_gpu()
    one = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)

    def look() -> tuple[float, ...]:
        return (
            pynvml.nvmlDeviceGetClockInfo(one, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetClockInfo(one, pynvml.NVML_CLOCK_MEM),
            pynvml.nvmlDeviceGetPowerUsage(one) / 1000,
            pynvml.nvmlDeviceGetTemperature(one, pynvml.NVML_TEMPERATURE_GPU),
        )

    look()
    return look


def by_program() -> Look:
    """Raises ValueError where nvidia-smi is not here, or has no numbers."""

    def look() -> tuple[float, ...]:
        found = tuple(map(float, ask_driver(ASKED, units=False)))
        if len(found) != len(ASKED):
            raise ValueError(NOBODY)
        return found

    look()
    return look


class Clocks:
    """What is seen while its block runs: `told` has the lowest, the median and the highest of each, and who told them.

    A block that a GPU is not measured in has `watching` false: nobody is asked, and nothing told.
    """

    def __init__(self, watching: bool = True) -> None:
        self.watching = watching
        self.told: dict[str, Any] = {}
        self._seen: list[tuple[float, ...]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._by = ""

    def __enter__(self) -> "Clocks":
        for name, find in (("nvidia-ml-py", by_nvml), ("nvidia-smi", by_program)) if self.watching else ():
            try:
                look = find()
            except Exception:  # no such package, no driver, or a driver that does not tell
                continue
            self._by = name
            self._thread = threading.Thread(target=self._watch, args=(look,), daemon=True)
            self._thread.start()
            break
        return self

    def _watch(self, look: Look) -> None:
        while True:
            try:
                self._seen.append(look())
            except Exception:  # a driver that tells no more
                return
            if self._over.wait(EVERY):
                return

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        seen: list[tuple[float, ...]] = self._seen[:]
        self.told = {"by": self._by if seen else NOBODY} if self.watching else {}
        for name, values in zip(UNITS, zip(*seen, strict=True), strict=False):
            self.told[name] = [min(values), median(values), max(values)]

    @property
    def summary(self) -> str:
        """For people: of each the median, with the lowest and highest where they differ."""
        parts = [
            f"{name} {middle:g} {UNITS[name]}" + ("" if low == high else f" ({low:g} to {high:g})")
            for name, (low, middle, high) in ((name, self.told[name]) for name in UNITS if name in self.told)
        ]
        return ", ".join(parts) or (f"clocks: {self.told['by']}" if self.told else "")
