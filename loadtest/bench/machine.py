"""The machine that a number holds for, and who else was busy on it."""

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from statistics import median
from typing import Any

from attend.model.machine import flags_of_processor, processor_name


def threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """What absolute values depend on."""
    of_x86 = {"amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2"}
    flags = sorted((of_x86 | {"asimddp", "bf16", "i8mm"}) & set(flags_of_processor()))
    return {
        "processor": processor_name(),
        "cores": threads(),
        "flags": flags,
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": next((each.version for each in distributions(name="torch")), None),  # none where callers alone run
    }


class Neighbours:
    """Processor time that others take: a neighbour of half a core makes parallel steps several times slower."""

    def __init__(self, ours: Sequence[int] = ()) -> None:
        """`ours` are processes that count as ours, beside this one."""
        import psutil  # whoever needs `threads` alone may lack it

        self._times = psutil.cpu_times
        self.ours = [psutil.Process(), *map(psutil.Process, ours)]
        self.laps: list[float] = []
        self.before = self._now()

    def _now(self) -> tuple[float, float]:
        times = self._times()
        own = sum(sum(each.cpu_times()[:2]) for each in self.ours)  # user and system
        busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return time.monotonic(), busy - own

    def lap(self) -> None:
        """Note how many cores others used since the last lap."""
        (then, spent), self.before = self.before, self._now()
        self.laps.append(max(0.0, (self.before[1] - spent) / (self.before[0] - then)))

    def sentence(self) -> str:
        """For the foot of a table."""
        return f"other processes used {median(self.laps):.2f} cores (median of the turns), {max(self.laps):.2f} at most"
