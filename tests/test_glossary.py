"""GLOSSARY.md has the concepts: so many at most, each with its files and its page."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def concepts() -> list[list[str]]:
    """The rows of the table."""
    lines = [line for line in (ROOT / "GLOSSARY.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_there_are_sixty_concepts_at_most_and_a_page_tells_each():
    assert 40 < len(concepts()) <= 60 and len({row[0] for row in concepts()}) == len(concepts())
    for _, where, page in concepts():
        paths = re.findall(r"`([^`]+)`", where)
        assert paths and re.fullmatch(r"\[[\w ]+\]\([\w/]+\.md(#[\w-]+)?\)", page), where
        assert all((ROOT / path).exists() or (ROOT / paths[0]).with_name(path).exists() for path in paths), where
