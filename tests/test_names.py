"""Public names say what a thing is or does: no bare preposition, and no bare participle beside the few that are left."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PREPOSITIONS = frozenset(
    {
        *("above", "after", "again", "ahead", "alone", "apart", "around", "aside", "away", "before", "behind"),
        *("below", "beside", "over", "together", "within"),
    }
)
IRREGULAR = frozenset(
    {
        *("begun", "bound", "built", "cut", "done", "drawn", "found", "given", "heard", "held", "kept", "known"),
        *("lost", "made", "meant", "met", "put", "said", "seen", "sent", "shown", "spent", "taken", "told", "written"),
    }
)
LEFT = 75
"""Participles that are still names, most of them of methods. It only goes down."""


def names(source: str) -> Iterator[str]:
    """The public functions, methods and classes of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def public() -> list[tuple[str, str]]:
    paths = [path for room in ("model", "service") for path in sorted((ROOT / room).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), name) for path in paths for name in names(path.read_text(encoding="utf-8"))]


def is_participle(name: str) -> bool:
    """One word, such as `told` or `checked`. A word like `feed` or `speed` is none."""
    return name.islower() and (name in IRREGULAR or re.fullmatch(r"[a-z]+(?<!e)ed", name) is not None)


def test_no_public_name_is_a_bare_preposition():
    """`over` and `around` make a value over or around another: they are methods of its class."""
    assert {name for _, name in public() if name in PREPOSITIONS} <= {"over", "around", "alone"}


def test_bare_participles_become_fewer():
    found = [(path, name) for path, name in public() if is_participle(name)]
    assert len(found) <= LEFT, f"{len(found)}, such as {found[-5:]}"


def test_what_is_looked_for_is_seen():
    source = "def told(): ...\nclass A:\n def feed(self): ...\n def checked(self): ..."
    assert [name for name in names(source) if is_participle(name)] == ["told", "checked"]
    assert not is_participle("Overloaded"), "an error is named by what happened"
