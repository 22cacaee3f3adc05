"""Names of functions, classes, fields, parameters and modules say what a thing is or does: none is a bare participle such as
`told`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BARE = re.compile(
    r"begun|bound|built|cut|done|drawn|found"
    r"|given|heard|held|kept|known|lent|lost|made|meant|met|said|seen|sent|shown|spent|taken|told|unread|written"
    r"|(?!shed$|embed$)[a-z]+(?<!e)ed"
)
ALLOWED = {"completed", "created", "failed", "interleaved", "quantised"}
"""Words of OpenAI's objects, of config.json, and of every engine."""
CONTRACT = "service/contract/"
"""Its types and fields are named in the OpenAPI document: they are what clients know."""


def names(source: str) -> Iterator[str]:
    """What a file defines, and the parameters of its public functions. An error is named by what happened."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            if node.name[0] != "_" or node.name.endswith("__"):
                yield from (each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg))
        elif isinstance(node, ast.ClassDef):
            if not any("Error" in base or "Exception" in base or base == "CallFailed" for base in map(ast.unparse, node.bases)):
                yield node.name
            yield from (each.target.id for each in node.body if isinstance(each, ast.AnnAssign))


def bare_names(source: str) -> list[str]:
    words = ((name, name.strip("_")) for name in names(source))
    return [name for name, word in words if BARE.fullmatch(word[:1].lower() + word[1:]) and word not in ALLOWED]


def test_no_name_is_a_bare_participle():
    paths = [path for room in ("model", "service", "loadtest") for path in sorted((ROOT / room).rglob("*.py"))]
    own = [path for path in paths if CONTRACT not in str(path)]
    assert {str(path): found for path in own if (found := bare_names(path.read_text(encoding="utf-8")))} == {}
    assert [path for path in own if BARE.fullmatch(path.stem) and path.stem not in ALLOWED] == []


def test_a_bare_name_is_seen():
    source = "def told(held, speed): ...\nclass Seen(A):\n checked: int\n created: int\n def feed(self): ...\n"
    assert bare_names(source + "class Overloaded(AttendError): ...\n") == ["told", "held", "Seen", "checked"]
