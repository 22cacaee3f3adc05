"""A docstring has enough words to be understood without its neighbour."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = re.compile(r"(See|As) `?[\w.]+`?\.")
"""`See Format.` leads to the docstring of the protocol that a method implements."""


@pytest.mark.parametrize(("room", "fewest"), [("model", 4), ("service", 3)])
def test_a_docstring_is_no_fragment(room, fewest):
    found = []
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or "a module may be silent"
                words = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", text))
                if len(words) < fewest and REFERENCE.fullmatch(text) is None:
                    found.append((str(path), text))
    assert found == []
