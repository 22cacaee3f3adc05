"""What this process may use: the least of what its machine has and what its control groups allow, of either version."""

import os
from pathlib import Path

import pytest

from attend.model.machine import (
    available_memory,
    instruction_sets,
    large_pages,
    memory_use,
    process_age,
    processor_name,
    usable_cores,
)

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712
"""What the kernel shows where version 1 sets no limit."""


def write(root: Path, **files: object) -> Path:
    """A tree of files; `__` in a name stands for `/`."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    return root


def machine(root: Path, groups: str, available: int = 1000 * MIB) -> Path:
    """A machine with memory available, and a process in these control groups."""
    meminfo = f"MemTotal: 2048000 kB\nMemFree: 1024 kB\nMemAvailable: {available // 1024} kB\nCached: 900000 kB"
    return write(root, proc__meminfo=meminfo, proc__self__cgroup=groups)


def group(root: Path, path: str, **files: object) -> None:
    """The files of one control group; `_` in a name stands for the dot of `memory.max`."""
    for name, text in files.items():
        kind, _, rest = name.partition("_")
        where = root / "sys/fs/cgroup" / path
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{kind}.{rest}").write_text(f"{text}\n", encoding="ascii")


def stat(inactive: int, active: int, prefix: str = "") -> str:
    return f"anon 5\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\nslab 7"


def test_page_cache_of_the_group_counts_as_available(tmp_path):
    """As a checkpoint that was just read: the kernel gives it up before it refuses memory."""
    machine(tmp_path, "0::/")
    group(tmp_path, "", memory_max=600 * MIB, memory_current=500 * MIB, memory_stat=stat(300 * MIB, 50 * MIB))
    assert 450 * MIB == available_memory(tmp_path)


def test_the_use_of_memory_is_that_of_the_tightest_group_without_its_page_cache(tmp_path):
    machine(tmp_path, "0::/outer/inner", available=100 * MIB)
    group(tmp_path, "outer", memory_max=800 * MIB, memory_current=750 * MIB, memory_stat=stat(40 * MIB, 10 * MIB))
    group(tmp_path, "outer/inner", memory_max=500 * MIB, memory_current=300 * MIB, memory_stat=stat(100 * MIB, 0))
    assert memory_use(tmp_path) == (700 * MIB, 800 * MIB), "100 are left of the outer one, 300 of the inner one"


@pytest.mark.parametrize("limit", ["max", UNLIMITED_V1])
def test_where_no_group_has_a_limit_the_machine_has(tmp_path, limit):
    machine(tmp_path, "0::/")
    group(tmp_path, "", memory_max=limit, memory_current=300 * MIB, memory_stat=stat(0, 0))
    assert memory_use(tmp_path) == (1000 * MIB, 2000 * MIB)


@pytest.mark.parametrize(("inner", "outer", "least"), [(600, 400, 300), (300, 400, 200), ("max", 400, 300)], ids=str)
def test_the_tightest_group_on_the_way_to_the_root_decides(tmp_path, inner, outer, least):
    machine(tmp_path, "0::/pods/one")
    for path, limit in (("pods/one", inner), ("pods", outer)):
        size = limit if limit == "max" else limit * MIB
        group(tmp_path, path, memory_max=size, memory_current=100 * MIB, memory_stat=stat(0, 0))
    assert least * MIB == available_memory(tmp_path)


def test_a_group_that_is_the_root_of_a_container_is_found_whatever_its_path_outside(tmp_path):
    """A container without a name space of its own sees the host's path, and its own files at the top."""
    machine(tmp_path, "0::/kubepods/pod1/container2")
    group(tmp_path, "", memory_max=200 * MIB, memory_current=50 * MIB, memory_stat=stat(0, 0))
    assert 150 * MIB == available_memory(tmp_path)


def test_version_1_is_read_too(tmp_path):
    machine(tmp_path, "9:cpu,cpuacct:/docker/a\n5:memory:/docker/a\n0::/")
    quiet = {"memory_usage_in_bytes": 400 * MIB, "memory_stat": stat(1, 1) + "\n" + stat(100 * MIB, 20 * MIB, "total_")}
    group(tmp_path, "memory/docker/a", memory_limit_in_bytes=500 * MIB, **quiet)
    group(tmp_path, "memory/docker", memory_limit_in_bytes=UNLIMITED_V1, **quiet)
    assert 220 * MIB == available_memory(tmp_path)


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    machine(tmp_path, "0::/")
    group(tmp_path, "", memory_max=MIB, memory_current=2 * MIB, memory_stat=stat(0, 0))
    assert 0 == available_memory(tmp_path)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1)], ids=str
)
def test_cores_are_the_whole_ones_of_the_quota_and_at_least_one(tmp_path, quota, cores):
    """A thread more than the quota pays for is stopped in the middle of a step, and all others wait for it."""
    machine(tmp_path, "0::/")
    group(tmp_path, "", cpu_max=quota)
    assert cores == usable_cores(tmp_path, affinity=range(8))


def siblings(root: Path, pairs: list[str]) -> None:
    """Cores, each with the hardware threads that the kernel lists of it, as `0,4` or `0-1`."""
    for pair in pairs:
        first, second = (int(cpu) for cpu in pair.replace("-", ",").split(","))
        for cpu in (first, second):
            write(root, **{f"sys__devices__system__cpu__cpu{cpu}__topology__thread_siblings_list": pair})


@pytest.mark.parametrize("pairs", [["0,4", "1,5", "2,6", "3,7"], ["0-1", "2-3", "4-5", "6-7"]], ids=str)
def test_hardware_threads_of_a_core_are_one(tmp_path, pairs):
    """Both share its multipliers: a thread more waits for them, and takes part of the caches."""
    root = machine(tmp_path, "0::/")
    siblings(root, pairs)
    assert 4 == usable_cores(root, affinity=range(8))


def test_only_cores_of_the_mask_count_and_one_thread_of_a_core_is_enough(tmp_path):
    root = machine(tmp_path, "0::/")
    siblings(root, ["0,4", "1,5", "2,6", "3,7"])
    assert [1, 2, 3] == [usable_cores(root, affinity=mask) for mask in ({0, 4}, {1, 2}, {0, 4, 1, 6})]


def test_a_quota_pays_for_no_more_than_the_physical_cores(tmp_path):
    root = machine(tmp_path, "0::/")
    siblings(root, ["0,4", "1,5", "2,6", "3,7"])
    group(tmp_path, "", cpu_max="600000 100000")
    assert 4 == usable_cores(root, affinity=range(8))
    group(tmp_path, "", cpu_max="300000 100000")
    assert 3 == usable_cores(root, affinity=range(8))


def test_the_tightest_quota_on_the_way_to_the_root_decides(tmp_path):
    machine(tmp_path, "0::/pods/one")
    group(tmp_path, "pods/one", cpu_max="600000 100000")
    group(tmp_path, "pods", cpu_max="300000 100000")
    assert 3 == usable_cores(tmp_path, affinity=range(8))


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (300000, 3)])
@pytest.mark.parametrize("controllers", ["cpu,cpuacct", "cpuacct,cpu", "cpu"])
def test_quotas_of_version_1_are_read_too(tmp_path, quota, cores, controllers):
    """The kernel may name the controllers of a tree in another order than its directory; each has a link of its own name."""
    machine(tmp_path, f"9:{controllers}:/docker/a\n0::/")
    group(tmp_path, "cpu,cpuacct/docker/a", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
    (tmp_path / "sys/fs/cgroup/cpu").symlink_to("cpu,cpuacct")
    assert cores == usable_cores(tmp_path, affinity=range(8))


def test_a_machine_without_control_groups_is_all_there_is(tmp_path):
    root = machine(tmp_path, "")
    (root / "proc/self/cgroup").unlink()
    assert (1000 * MIB, 8) == (available_memory(root), usable_cores(root, affinity=range(8)))


def test_a_process_is_as_old_as_the_kernel_says(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"4242 (a process) of (mine) S {'0 ' * 18}{50 * ticks} 0 0"
    assert process_age(write(tmp_path, proc__self__stat=stat, proc__uptime="62.50 100.00")) == 12.5
    assert process_age(tmp_path / "nothing") == 0.0
    assert 0 < process_age() < 86400


def test_a_processor_is_named_with_what_multiplies_most_first(tmp_path):
    first = "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 avx512f avx512_bf16"
    cpuinfo = f"{first}\n\nprocessor\t: 1\nflags\t\t: amx_bf16"
    root = write(tmp_path, proc__cpuinfo=cpuinfo)
    assert processor_name(root) == "AMD EPYC 9B14"
    assert instruction_sets(root) == ["AVX-512-BF16", "AVX-512", "AVX2"]
    arm = write(tmp_path / "arm", proc__cpuinfo="processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16")
    assert instruction_sets(arm) == ["I8MM", "BF16", "DOTPROD"]
    assert instruction_sets(tmp_path / "nothing") == [] and processor_name(tmp_path / "nothing")


@pytest.mark.parametrize(("text", "found"), [("always [madvise] never", "madvise"), ("always madvise [never]", "never")])
def test_large_pages_are_as_the_system_gives_them(tmp_path, text, found):
    assert large_pages(write(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=text)) == found
    assert large_pages(tmp_path / "nothing") == ""
