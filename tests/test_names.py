"""Public names say what a thing is or does, in the field's words: no bare participle or preposition, and no bare word twice.
So do the parameters of public functions."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

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
        *("lent", "lost", "made", "meant", "met", "put", "said", "seen", "sent", "shown", "spent", "taken", "told"),
        *("unread", "written"),
    }
)
VERBS = frozenset({"embed", "put", "shed"})
"""Words that look like participles and are verbs: a function or a module may be called so."""
ALLOWED = {
    "completed": "OpenAI's count of a batch, and the column of the database",
    "created": "OpenAI's time of an object, and the column of the database",
    "failed": "OpenAI's count of a batch, and the column of the database",
    "interleaved": "a key of config.json, and the field's word for such rotary pairs",
    "quantised": "what every engine calls such weights",
}
"""Participles that are the field's own words, and why."""
LEFT_PRIVATE = 0
"""Private names that are still bare participles. It only goes down."""
ROOMS = ("model", "service", "loadtest")
COMMANDS, FAMILIES, WIRE = "service/commands/", "model/net/families/", "service/contract/"


def is_participle(name: str) -> bool:
    """One word, such as `told` or `checked`. A word like `feed` or `speed` is none."""
    return name.islower() and (name in IRREGULAR or re.fullmatch(r"[a-z]+(?<!e)ed", name) is not None)


def is_riddle(kind: str, name: str) -> bool:
    """True if a name is a participle that its kind (`function`, `class`, `field`, `parameter` or `module`) does not allow."""
    return is_participle(name) and name not in ALLOWED and not (kind in ("function", "module") and name in VERBS)


def names(source: str) -> Iterator[tuple[str, str]]:
    """The functions, methods, classes and annotated fields of classes of a file, each with its kind."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", node.name
        elif isinstance(node, ast.ClassDef):
            if not any("Error" in base or "Exception" in base or base == "CallFailed" for base in map(ast.unparse, node.bases)):
                yield "class", node.name  # an error is named by what happened
            yield from (("field", each.target.id) for each in node.body if is_field(each))


def is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def parameters(source: str) -> Iterator[tuple[str, str]]:
    """The public functions of a file, and the methods that begin and end with two underscores, each with each parameter."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.name[0] != "_" or node.name.endswith("__")):
            yield from ((node.name, each.arg) for each in ast.walk(node.args) if isinstance(each, ast.arg))


def riddles(source: str, *, private: bool) -> list[str]:
    """The names of a file that are riddles: those that begin with an underscore, or the others."""
    found = []
    for kind, name in names(source):
        word = name.strip("_")
        if kind == "class":
            word = word[:1].lower() + word[1:]  # `Observation`; one of two words keeps the capital of the second
        if name.startswith("_") == private and is_riddle(kind, word):
            found.append(name)
    return found


def sources(rooms: tuple[str, ...] = ROOMS[:2]) -> Iterator[tuple[str, str]]:
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def functions(source: str) -> list[str]:
    """The public functions of a module."""
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in found if not node.name.startswith("_")]


def test_no_public_name_is_a_bare_participle():
    """Types of the contract are named in the OpenAPI document, and their fields on the wire: they are what clients know."""
    assert [
        (path, riddles(text, private=False))
        for path, text in sources(ROOMS)
        if not path.startswith(WIRE) and riddles(text, private=False)
    ] == []


def test_no_parameter_of_a_public_function_is_a_bare_participle():
    """What is passed has a name that says what it is: `matches` or `kv_dtype`, and not `found` or `held`."""
    assert [
        (path, function, name)
        for path, text in sources(ROOMS)
        for function, name in parameters(text)
        if is_riddle("parameter", name.strip("_"))
    ] == []


def test_private_participles_become_fewer():
    found = [(path, name) for path, text in sources(ROOMS) for name in riddles(text, private=True) if not path.startswith(WIRE)]
    assert len(found) <= LEFT_PRIVATE, f"{len(found)}, such as {found[-5:]}"


def test_no_module_is_a_bare_participle_or_preposition():
    stems = [(path, Path(path).stem) for path, _ in sources(ROOMS) if not path.startswith(WIRE)]
    assert [path for path, stem in stems if is_riddle("module", stem) or stem in PREPOSITIONS] == []


def test_no_public_name_is_a_bare_preposition():
    """`over` and `around` make a value over or around another: they are methods of its class."""
    found = {name for _, text in sources(ROOMS) for kind, name in names(text) if kind == "function" and name in PREPOSITIONS}
    assert found <= {"over", "around", "alone"}


def test_a_bare_word_names_the_function_of_one_file_alone():
    """`read` says what it reads, if two files have one. Families are one interface; commands are verbs of the command line, as
    `run` and `main` are where a process begins."""
    where: dict[str, set[str]] = defaultdict(set)
    for path, text in sources():
        for name in functions(text):
            if name.isalpha() and name not in ("run", "main"):
                where[name].add(next((room for room in (COMMANDS, FAMILIES) if path.startswith(room)), path))
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


@pytest.mark.parametrize("private", [False, True])
def test_what_is_looked_for_is_seen(private):
    mark = "_" if private else ""
    source = (
        f"def {mark}told(): ...\nclass {mark}Seen:\n def feed(self): ...\n def {mark}checked(self): ...\n {mark}held: int\n"
    )
    assert sorted(riddles(source, private=private)) == sorted(f"{mark}{name}" for name in ("told", "Seen", "checked", "held"))
    assert riddles("class Overloaded(AttendError): ...\nclass A:\n created: int\n def embed(self): ...\n", private=False) == []


def test_the_parameters_that_are_looked_for_are_seen():
    source = (
        "class A:\n def __init__(self, held, /, *found, given=lambda told: told, **wanted): ...\n"
        "async def read(sent: list[int]): ...\ndef _read(seen): ...\ndef open(speed, put, is_shared): ...\n"
    )
    seen = [name for _, name in parameters(source) if is_riddle("parameter", name)]
    assert sorted(seen) == ["found", "given", "held", "put", "sent", "told", "wanted"]
