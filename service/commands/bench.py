"""`attend bench`: the benchmarks of the source tree, by the names of their files."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from attend.model.errors import SettingError

SOURCE_TREE = Path(__file__).parents[3]
FOLDER = SOURCE_TREE / "loadtest" / "bench"
COMMAND = re.compile(r":? (\w+=\w+ )*attend bench ")
"""Where the first line of a benchmark's docstring goes over from what it measures to how it is called."""


def list_benchmarks() -> list[str]:
    """A line for each benchmark: its name, and what it measures. Raises SettingError without a source tree."""
    found = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if _is_benchmark(path)}
    if not found:
        raise SettingError("benchmarks come with the source tree, in loadtest/bench, and it is not here")
    width = max(map(len, found))
    lines = [f"{name:<{width}}  {_title(path)}" for name, path in found.items()]
    return ["attend bench NAME [flags]; attend bench NAME --help has the flags", "", *lines]


def run(name: str, words: Sequence[str]) -> None:
    """Run a benchmark with its own flags. Raises SettingError for a name that there is not."""
    if not name.isidentifier() or not _is_benchmark(FOLDER / f"{name}.py"):
        raise SettingError(f"there is no benchmark {name!r} here; they come with the source tree, in loadtest/bench")
    sys.path.insert(0, str(SOURCE_TREE))
    # Its children are modules of the tree too, wherever this was started.
    path = os.pathsep.join(filter(None, (str(SOURCE_TREE), os.getenv("PYTHONPATH"))))
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    sys.argv = [f"attend bench {name}", *words]
    importlib.import_module(f"loadtest.bench.{name}").main()


def _is_benchmark(path: Path) -> bool:
    return path.is_file() and "\ndef main(" in path.read_text(encoding="utf-8")


def _title(path: Path) -> str:
    document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return COMMAND.split(document.partition("\n")[0])[0]
