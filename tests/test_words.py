"""Docstrings say what they are about by themselves: a fragment needs its neighbour to be understood."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FRAGMENTS = {"model": 0, "service": 0}
"""Docstrings that are left in a package and are fragments: see `FEWEST_WORDS`. It only goes down."""
FEWEST_WORDS = {"model": 4, "service": 3}
"""Words that a docstring has at least; with less it is a fragment."""
REFERENCE = re.compile(r"(See|As) `?[\w.]+`?\.")
"""`See Format.` leads to the docstring of the protocol that a method implements."""


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of modules, classes, functions and attributes, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, here in zip([None, *body], body, strict=False):
            first = before is None and not isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try)
            text = here.value.value if isinstance(here, ast.Expr) and isinstance(here.value, ast.Constant) else None
            if isinstance(text, str) and (first or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield here.lineno, text


def is_fragment(docstring: str, fewest: int = 3) -> bool:
    """True if a docstring has less than `fewest` words, signs and shapes in brackets not counted."""
    words = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", docstring))
    return len(words) < fewest and REFERENCE.fullmatch(docstring) is None


def fragments(room: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, text in documented(ast.parse(path.read_text(encoding="utf-8")))
        if is_fragment(text, FEWEST_WORDS[room])
    ]


@pytest.mark.parametrize("room", MAX_FRAGMENTS)
def test_no_more_docstrings_are_fragments_than_were_left(room):
    found = fragments(room)
    assert len(found) <= MAX_FRAGMENTS[room], found


def test_a_fragment_is_seen_and_a_sentence_and_a_reference_are_not():
    code = '"""In words."""\nA = 1\n"""By bits."""\nclass C:\n    """[T, E]."""\n    b: int\n    """Bytes of it."""\n'
    assert [text for _, text in documented(ast.parse(code)) if is_fragment(text)] == ["In words.", "By bits.", "[T, E]."]
    whole = '"""The blocks that are free."""\nf(1)\n"no docstring"\n'
    assert [text for _, text in documented(ast.parse(whole)) if is_fragment(text)] == []
    assert not is_fragment("See Format.") and not is_fragment("As `GrpcClient.stream`.")
    assert is_fragment("End a request.", 4) and not is_fragment("End a request.", 3)
