"""No tool imports a name that is gone: mypy does not read `loadtest/`, and some of its modules are imported by no test."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "loadtest").rglob("*.py"))


@cache
def bound(path: Path) -> frozenset[str]:
    """The names that a file defines or imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def gone(source: str) -> list[str]:
    """What a file imports of ours that its module does not have."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        if node.module.partition(".")[0] not in ("attend", "loadtest") or node.module == "attend.v1":
            continue
        place = ROOT / node.module.replace(".", "/")
        file = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
        known = bound(file) if file.exists() else frozenset()
        for name in (each.name for each in node.names):
            if name not in known and not (place / name).is_dir() and not (place / f"{name}.py").exists():
                found.append(f"{node.module}.{name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_tool_imports_is_there(path):
    assert gone(path.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_found():
    source = "from attend.service.http_api.site import RouteDeps, Site\nfrom attend.model.nothing import a\n"
    source += "from loadtest import load"
    assert gone(source) == ["attend.service.http_api.site.Site", "attend.model.nothing.a"]
