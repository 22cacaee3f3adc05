"""What this process may use of its machine: memory and cores, as far as the kernel and its control groups let it.

A group's limit holds for all groups inside it, so the least on the way from the process's own group to the root decides.
In a container the path that the kernel tells may be the host's, of which only the container's own end can be read:
directories that are missing set no limit.

Sources: proc_meminfo(5), cgroups(7), and the kernel's cgroup-v2.rst, cgroup-v1/memory.rst, scheduler/sched-bwc.rst
and cputopology.rst.
"""

import os
import platform
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

ROOT = Path("/")
CACHED = ("inactive_file", "active_file")
"""Page cache: charged to the group that read a file, and given up before the kernel refuses memory."""


def available_memory(root: Path = ROOT) -> int:
    """Bytes that may still be taken. Page cache counts as free, that of a checkpoint that was just read too."""
    [free] = [line.split()[1] for line in _text(root / "proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    left = [bytes_left for group in _groups(root, "memory") if (bytes_left := _memory_left(group)) is not None]
    return max(0, min([int(free) * 1024, *left]))


def memory_use(root: Path = ROOT) -> tuple[int, int]:
    """(bytes in use that cannot be given up, bytes allowed): of the tightest group, or of the machine if none has a limit."""
    lines = dict(line.split(":") for line in _text(root / "proc/meminfo").splitlines() if line.startswith("Mem"))
    total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    found = []
    for group in _groups(root, "memory"):
        limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
        if (left := _memory_left(group)) is not None and int(limit) <= total:  # more is how version 1 says that it has none
            found.append((left, int(limit)))
    left, limit_bytes = min(found, default=(free, total))
    return limit_bytes - left, limit_bytes


def usable_cores(root: Path = ROOT, affinity: Collection[int] | None = None) -> int:
    """Cores that threads may keep busy, at least 1: the physical ones of the affinity mask, at most what the quota pays for.

    Two hardware threads of a core share its multipliers: a second one computes little more, and each takes part of the caches.
    A quota is rounded down: threads that use it up are stopped until its next period, and a step waits for all its threads.
    """
    mask = os.sched_getaffinity(0) if affinity is None else affinity
    cores = len({_siblings(root, cpu) for cpu in mask})
    return max(1, min([cores, *(int(quota) for group in _groups(root, "cpu") if (quota := _quota(group)) is not None)]))


def process_age(root: Path = ROOT) -> float:
    """Seconds since this process began (proc_pid_stat(5)); 0 where the kernel does not say."""
    stat, uptime = _text(root / "proc/self/stat").rpartition(")")[2].split(), _text(root / "proc/uptime").split()
    return float(uptime[0]) - int(stat[19]) / os.sysconf("SC_CLK_TCK") if stat and uptime else 0.0


INSTRUCTION_SETS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512-BF16",
    "avx512_vnni": "AVX-512-VNNI",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "asimddp": "DOTPROD",
}
"""Instruction sets of x86 and of Arm by the kernel's flags, the one with the widest matrix products first."""


def instruction_sets(root: Path = ROOT) -> list[str]:
    """The processor's instruction sets for matrix products, the best one first."""
    flags = flags_of_processor(root)
    return [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]


def flags_of_processor(root: Path = ROOT) -> list[str]:
    """What the kernel says that the processor can do."""
    return (_of_processor(root, "flags") or _of_processor(root, "Features")).split()  # the second on Arm


def processor_name(root: Path = ROOT) -> str:
    """The processor's name as the kernel gives it, or else the machine's architecture."""
    return _of_processor(root, "model name") or platform.machine()


def large_pages(root: Path = ROOT) -> str:
    """True if the system gives memory in large pages: always, madvise (as Attend asks for them), or never; empty: not known."""
    return _text(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]


def first_gpu() -> str:
    """The number or UUID by which the driver knows the GPU that CUDA calls 0."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def ask_driver(names: Sequence[str], *, units: bool = True) -> list[str]:
    """The values that nvidia-smi has under these names for the first GPU, with their units; none without it."""
    form = "csv,noheader" if units else "csv,noheader,nounits"
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", f"--format={form}", "-i", first_gpu()]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [value.strip() for value in found.split(",")]


def _of_processor(root: Path, name: str) -> str:
    """What the kernel says of the first processor under a name."""
    lines = (line.partition(":") for line in _text(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of a CPU's core, the same words for each of them; the CPU alone where the kernel does not say."""
    return _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of the process's groups, of version 2 and of the controller's own tree of version 1, up to the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")  # version 1 has a directory or link of this name
        own = top / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _memory_left(group: Path) -> int | None:
    """Bytes under the group's limit; None where it has none."""
    limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
    used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
    if limit in ("", "max") or not used:
        return None
    counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    # in version 1 the plain numbers leave out the groups inside, which its usage counts
    cached = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in CACHED)
    return int(limit) - max(0, int(used) - cached)


def _quota(group: Path) -> float | None:
    """Cores that the group's processes may use at the same time; None where they may use all."""
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    return None if quota in ("", "max", "-1") else int(quota) / int(period)


def _text(path: Path) -> str:
    """What a file says; nothing where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
