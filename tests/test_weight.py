"""No package grows beyond its bounds in weight.csv, which only go down."""

from tests.weight import BOUNDS, bounds, lowered, table, weights


def test_no_package_is_above_its_bounds() -> None:
    limits = bounds(BOUNDS.read_text(encoding="utf-8"))
    found = {name: each.bounds() for name, each in weights().items()}
    assert found.keys() <= limits.keys(), "a new package needs a row: python -m tests.weight --write"
    above = {name: (row, limits[name]) for name, row in found.items() if any(map(int.__gt__, row, limits[name]))}
    assert not above, f"lines of Python, tokens, words of Markdown, and their bounds: {above}"


def test_bounds_are_only_lowered() -> None:
    assert lowered({"a": [5, 5, 0], "gone": [1, 1, 1]}, {"a": [4, 6, 0], "new": [7, 7, 7]}) == {
        "a": [4, 5, 0],
        "new": [7, 7, 7],
    }
    rows = {"a/b": [1234, 5, 0]}
    assert bounds(table(rows)) == rows
