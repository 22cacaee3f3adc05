"""Which functions a model is asked to complete, where its completion is cut, and when that counts as Python."""

import hashlib
import warnings
from pathlib import Path

import pytest

from attend.model.train.headers import (
    Header,
    Verdict,
    choose_headers,
    count_verdicts,
    first_block,
    headers_of,
    is_python,
    judge,
)


def held_out_names(count: int) -> list[str]:
    names = (f"m{i:05}.py" for i in range(100_000))
    held = (name for name in names if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50 == 0)
    return [next(held) for _ in range(count)]


def write(root: Path, *texts: str) -> list[str]:
    """Held-out files with these texts, in this order; their paths."""
    names = held_out_names(len(texts))
    for name, text in zip(names, texts, strict=True):
        (root / name).write_text(text, encoding="utf-8")
    return names


CUTS = {
    "a plain body": ("\n    return 1\n", "\ndef g():\n    pass\n"),
    "a statement after it": ("\n    return 1\n", "\nx = 1"),
    "one letter is enough": ("\n    return 1\n", "\nd"),
    "blank lines, with and without spaces": ("\n    a = 1\n\n   \n\t\n    return a\n\n", "\n@decorated\ndef g():"),
    "a nested function": ("\n    def inner():\n        return 1\n    return inner\n", "\nclass A:\n    pass"),
    "a nested decorator": ("\n    @wraps(f)\n    def inner():\n        return f()\n    return inner\n", "\n@cache\n"),
    "an async neighbour": ("\n    await g()\n", "\nasync def h():\n    pass"),
    "a comment in column 0": ("\n    a = 1\n", "\n# not of this function\n    return a\n"),
    "a comment inside": ("\n    a = 1\n # odd, but indented\n    return a\n", "\n# over"),
    "a multi-line string": ('\n    """Say it.\n\n    And more.\n    """\n    return 1\n', "\nx"),
    "a string whose lines stand in column 0": ('\n    text = """\n', '\nword\n"""\n    return text\n'),
    "a bracket that closes in column 0": ("\n    f(\n        1,\n", "\n)\n"),
    "a body on the header's line": (" return 1\n", "\nx = 2"),
    "a comment after the colon": ("  # why\n    return 1\n", "\nx = 2"),
    "tabs": ("\n\treturn 1\n", "\nx"),
    "nothing but a dedent": ("\n", "\nx = 1\n"),
}


@pytest.mark.parametrize(("body", "rest"), CUTS.values(), ids=CUTS.keys())
def test_a_body_ends_before_the_first_line_in_column_0_that_is_not_blank(body, rest):
    assert first_block(body + rest.removeprefix("\n")) == body


@pytest.mark.parametrize(("body", "rest"), CUTS.values(), ids=CUTS.keys())
def test_blank_lines_before_the_dedent_are_no_dedent(body, rest):
    assert first_block(body + "\n  \n" + rest.removeprefix("\n")) == body + "\n  \n"


@pytest.mark.parametrize("body", [body for body, _ in CUTS.values()], ids=CUTS.keys())
def test_a_body_alone_has_no_end(body):
    """Neither the end of the completion nor blank lines are a dedent: more of the body might follow."""
    assert first_block(body) is None
    assert first_block(body + "\n \n\n") is None
    assert first_block("") is None


@pytest.mark.parametrize("name", CUTS.keys())
def test_what_was_cut_parses_unless_the_cut_went_through_syntax(name):
    """The rule knows no syntax: a line of a string, or a bracket, in column 0 ends the body and leaves it broken."""
    broken = {"a string whose lines stand in column 0", "a bracket that closes in column 0", "nothing but a dedent"}
    body, rest = CUTS[name]
    verdict = judge("async def f():", body + rest.removeprefix("\n"), is_complete=False)
    assert Verdict(is_complete=True, parses=name not in broken) == verdict


@pytest.mark.parametrize(
    ("completion", "stopped", "verdict"),
    [
        ("\n    return 1\n", False, Verdict(is_complete=False, parses=False)),
        ("\n    return 1\n", True, Verdict(is_complete=True, parses=True)),
        ("\n    return 1", True, Verdict(is_complete=True, parses=True)),
        ("\n    return 1\nx = (", False, Verdict(is_complete=True, parses=True)),
        ("\n    return 1\nx = (", True, Verdict(is_complete=True, parses=True)),
        ("\n    return (\n\nx", False, Verdict(is_complete=True, parses=False)),
        ("\n    a\n   b\nx", False, Verdict(is_complete=True, parses=False)),
        ("\n    a = '\0'\nx", False, Verdict(is_complete=True, parses=False)),
        ("", True, Verdict(is_complete=True, parses=False)),
        ("", False, Verdict(is_complete=False, parses=False)),
        ("x\n", True, Verdict(is_complete=True, parses=True)),
    ],
)
def test_a_completion_counts_if_it_ends_and_is_python_up_to_there(completion, stopped, verdict):
    """A body that never ends has failed, however good it is; what follows the dedent is not looked at."""
    assert judge("def f():", completion, is_complete=stopped) == verdict


def test_the_header_is_judged_with_its_body():
    assert judge("def f(a, a):", "\n    return 1\nx", is_complete=False).parses  # what only the compiler refuses is Python here
    assert not judge("def f(a b):", "\n    return 1\nx", is_complete=False).parses


@pytest.mark.parametrize("text", ["x = " + "(" * 5000, "x = " + "-" * 200_000 + "1", "a = \0", "\ud800"])
def test_text_that_the_parser_cannot_bear_is_no_python(text):
    assert not is_python(text)


def test_an_unknown_escape_is_python_without_a_warning():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert is_python(r"x = '\d'")
    assert [] == seen


def test_verdicts_are_counted():
    verdicts = [
        Verdict(is_complete=True, parses=True),
        Verdict(is_complete=True, parses=False),
        Verdict(is_complete=False, parses=False),
    ]
    assert count_verdicts([*verdicts, verdicts[0]]) == (3, 2)


def test_headers_are_single_lines_in_column_0():
    text = """
def plain(a, b=1, *c, **d) -> int:
    def nested():
        pass
class A:
    def method(self):
        pass
async def waits():
    pass
def short(): return 1
def commented():  # why
    pass
def long(a,
         b):
    pass
def noted(a: {"x": 1} = {"y":
          2}):
    pass
define(x) ; y = lambda:
def (x):
@decorated
def last(
): pass
"""
    assert headers_of(text) == ["def plain(a, b=1, *c, **d) -> int:", "async def waits():"]


def test_files_take_turns(tmp_path):
    """The first header of each file in order, then the second of each; the third file has one, the second none."""
    files = [("a1", "a2", "a3"), (), ("c1",), ("d1", "d2")]
    names = write(tmp_path, *("".join(f"def {name}():\n    pass\n" for name in file) for file in files))
    expected = [("a1", 0), ("c1", 2), ("d1", 3), ("a2", 0), ("d2", 3), ("a3", 0)]
    assert [Header(names[at], f"def {name}():") for name, at in expected] == choose_headers(tmp_path)
    assert [f"def {name}():" for name, _ in expected[:3]] == [header.text for header in choose_headers(tmp_path, 3)]


def test_a_header_is_asked_for_once(tmp_path):
    names = write(tmp_path, "def f():\n    1\ndef f():\n    2\ndef g():\n    3\n", "def f():\n    4\ndef h():\n    5\n")
    expected = [(names[0], "def f():"), (names[1], "def h():"), (names[0], "def g():")]
    assert [(header.path, header.text) for header in choose_headers(tmp_path)] == expected


def test_files_to_train_on_are_not_asked_for(tmp_path):
    write(tmp_path, "def held_out():\n    pass\n")
    trained = next(name for i in range(9) if (name := f"m{i:05}.py") not in held_out_names(1))
    (tmp_path / trained).write_text("def trained():\n    pass\n")
    assert ["def held_out():"] == [header.text for header in choose_headers(tmp_path)]
