"""Wraps the prose of Markdown pages: `python -m tests.wrap PAGE ...`. Tables, code, headings and words stay as they are."""

import re
import sys
from pathlib import Path

WIDTH = 120
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
ALONE = re.compile(r" *(?:```|\||#|<!--|!\[)|\s*$")
"""How a line begins that belongs to no paragraph."""
WORD = re.compile(r"(?:`[^`]*`|\[[^\]`]{1,80}\]\([^)\s]{1,60}\)|\S)+")
"""Code between backticks and a link of usual length are one word."""
MARK = re.compile(r"(?:[-+*]|\d+[.)]|#+|>.*|\|.*|=+)$")
"""A word that would begin a list or a heading at the beginning of a line."""


def words(text: str) -> list[str]:
    """The words of a paragraph. What must not begin a line stays with the word before."""
    found: list[str] = []
    for word in WORD.findall(text):
        if found and MARK.match(word):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def paragraph(text: str, first: str, rest: str) -> list[str]:
    """The lines of a paragraph, whose first begins with `first` and the others with `rest`."""
    lines = [first]
    for word in words(text):
        is_empty = lines[-1] in (first, rest)
        if not is_empty and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(rest)
            is_empty = True
        lines[-1] += word if is_empty else f" {word}"
    return lines


def wrapped(page: str) -> str:
    """The page with its paragraphs and the items of its lists wrapped."""
    lines: list[str] = []
    given, is_code, indent = page.split("\n"), False, 0
    while given:
        line = given.pop(0)
        is_code ^= line.lstrip().startswith("```")
        depth, item = len(line) - len(line.lstrip()), ITEM.match(line)
        is_item = item is not None and (depth < 4 or indent > 0)
        if is_code or ALONE.match(line) or (depth >= 4 and depth != indent and not is_item):
            lines.append(line)
            indent = 0 if line.startswith("#") else indent
            continue
        first = item[0] if item is not None and is_item else " " * depth
        indent = len(first)
        text = [line[len(first) :]]
        while given and not ALONE.match(given[0]) and not ITEM.match(given[0]):
            text.append(given.pop(0).strip())
        lines += paragraph(" ".join(text), first, " " * indent)
    return "\n".join(lines)


def main(pages: list[str]) -> None:
    """Wrap pages in their place."""
    for page in map(Path, pages):
        page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
