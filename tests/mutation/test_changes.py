"""Mutants are programs that differ in one place, and in nothing that only people read."""

import ast

import pytest

from tests.mutation.changes import mutants

SOURCE = '''
"""Words."""
LIMIT: int = 3


@cache(size=4)
def first(names: list[str], most: int = 5) -> str | None:
    """Words of it."""
    if not names or len(names) > most:
        log.warning("so many: %d", 6)
        raise TooMany(f"at most {most + 7}", "names")
    names.sort()
    assert names[0]
    return "größer" if names[0] == "ä" else names[1 - 2]
'''


def test_each_mutant_is_another_program_and_changes_one_place():
    found = mutants("a.py", SOURCE)
    texts = [mutant.applied(SOURCE) for mutant in found]
    assert len({ast.dump(ast.parse(text)) for text in [SOURCE, *texts]}) == len(found) + 1
    assert {(mutant.old, mutant.new) for mutant in found} == {
        ("3", "4"),
        ("5", "6"),
        ("not names or len(names) > most", "(not names and len(names) > most)"),
        ("not names", "(names)"),
        ("len(names) > most", "(len(names) >= most)"),
        ('raise TooMany(f"at most {most + 7}", "names")', "pass"),
        ("names.sort()", "pass"),
        ('return "größer" if names[0] == "ä" else names[1 - 2]', "return None"),
        ('"größer" if names[0] == "ä" else names[1 - 2]', "(names[1 - 2] if names[0] == 'ä' else 'größer')"),
        ('"größer"', "'größerx'"),
        ('names[0] == "ä"', "(names[0] != 'ä')"),
        ("0", "1"),
        ('"ä"', "'äx'"),
        ("1 - 2", "(1 + 2)"),
        ("1", "2"),
        ("2", "3"),
    }


@pytest.mark.parametrize(("text", "span"), [("len(names)", range(9, 10)), ("names.sort", range(12, 13)), ("most", range(7, 8))])
def test_a_mutant_has_the_lines_of_its_statement_without_the_statements_below_it(text, span):
    assert span in [mutant.span for mutant in mutants("a.py", SOURCE) if text in mutant.text]
