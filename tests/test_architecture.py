"""What the house rules say of all code at once: size, docstrings, and what may not be used where."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parent.parent


def files(*rooms: str, name: str) -> list[Path]:
    return [path.relative_to(ROOT) for room in rooms for path in sorted((ROOT / room).rglob(name))]


SOURCES = files("model", "service", "loadtest", name="*.py")
PACKAGES = files("attend", "model", "service", "protos", name="__init__.py")
HOUSE = [path for path in SOURCES if path.parts[0] != "loadtest"]
MAX_FILE, MAX_FUNCTION, MAX_P90, MAX_MEDIAN = 400, 60, 30, 10
READS_ENVIRONMENT = {
    Path("model/devices.py"),
    Path("model/machine.py"),
    Path("model/net/native/library.py"),
    Path("model/parallel/group.py"),
    Path("service/settings.py"),
    Path("service/commands/bench.py"),
    Path("service/runtime/supervisor.py"),
    Path("service/runtime/driver.py"),
    Path("service/runtime/files.py"),
    Path("service/runtime/haproxy.py"),
    Path("service/runtime/leave.py"),
    Path("service/runtime/single.py"),
}
"""What hides a GPU; the folder of caches; the settings; the parents of benchmarks and of Ray, which hand theirs on; what Ray
starts as HAProxy, which imports nothing of ours; a pod that leaves, for the address of its head; one process, which sets what
torch reads; what NCCL and torch's allocator find before they start."""
UNSAFE_MODULES = {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function, nested ones too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            yield f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def imported(path: Path) -> set[str]:
    """Modules and names that a file imports, dotted."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def calls(path: Path) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def reads_environment(path: Path) -> bool:
    touched = {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    return bool(names & (touched | imported(path)))


def test_no_file_is_longer_than_a_reader_bears():
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE} == {}


def test_functions_are_short():
    lengths = dict(pair for path in SOURCES for pair in functions(path))
    assert {} == {name: length for name, length in lengths.items() if length > MAX_FUNCTION}
    assert median(lengths.values()) <= MAX_MEDIAN
    assert quantiles(lengths.values(), n=10)[-1] <= MAX_P90


def undocumented(path: Path) -> list[str]:
    """The public functions and classes of a file without a docstring, and `module` where it has none itself."""
    module = tree(path)
    public = [node for node in module.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")]
    silent = [node.name for node in public if ast.get_docstring(node) is None]
    return silent if path.name == "__init__.py" or ast.get_docstring(module) else ["module", *silent]


def test_every_module_and_public_name_has_a_docstring():
    assert {path: names for path in HOUSE if (names := undocumented(path))} == {}


def test_the_environment_is_read_in_one_place():
    assert READS_ENVIRONMENT == {path for path in HOUSE if reads_environment(path)}


def test_nothing_that_runs_what_it_reads_is_used():
    """Checkpoints, requests and messages are data: no pickle in any form, no eval."""
    assert [path for path in HOUSE if {name.partition(".")[0] for name in imported(path)} & UNSAFE_MODULES] == []
    assert [path for path in HOUSE if set(calls(path)) & UNSAFE_CALLS] == []


def test_the_model_prints_only_where_it_is_a_program():
    """Training talks to a terminal, and the compiler of the native decoder; all else has a log."""
    silent = [path for path in HOUSE if path.parts[0] == "model" and path.parts[1] != "train" and path.name != "__main__.py"]
    assert [path for path in silent if "print" in calls(path)] == []


def test_parent_packages_run_nothing():
    """What stands there is imported with every module below it, unseen by import-linter."""
    assert [path for path in PACKAGES if len(tree(path).body) != (ast.get_docstring(tree(path)) is not None)] == []
