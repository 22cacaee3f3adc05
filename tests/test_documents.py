"""Documents tell the truth: links lead somewhere; files, functions, tests, verbs and commands that they name exist."""

import ast
import re
import urllib.parse
from functools import cache
from pathlib import Path

from typer.core import TyperGroup
from typer.main import get_command

from attend.service.commands.cli import app
from tests.wrap import WIDTH

ROOT = Path(__file__).parent.parent
ROOMS = ("attend", "model", "service", "protos", "deploy", "docs", "loadtest", "tests")
PAGES = [
    page.relative_to(ROOT) for page in (*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md")))
]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|(?:src|srcset|href)=\"([^\"]+)\"")
SPAN = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(r"([\w./-]+\.(?:py|h|cpp))::([\w.]+)")
SAMPLES = Path("model/default/README.md")
"""Names files of the standard library."""
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|h|cpp|md|proto|yaml|json|sh)")


@cache
def text_of(page: Path) -> str:
    """A page without its blocks of code between fences."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text_of(page), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.append(f"{plain}-{found.count(plain)}" if plain in found else plain)
    return set(found)


def links_of(page: Path) -> list[str]:
    """The links of a page that lead into this tree."""
    prose = SPAN.sub("", text_of(page))
    found = [markdown or html for markdown, html in LINK.findall(prose)]
    return [link for link in found if not urllib.parse.urlsplit(link).scheme]


@cache
def names_in(path: Path) -> set[str]:
    """The functions, classes and methods that a file of Python defines, dotted."""
    names: set[str] = set()

    def visit(nodes: list[ast.stmt], before: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(before + node.name)
                visit(node.body, f"{before}{node.name}.")

    visit(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "")
    return names


def defines(path: str, name: str) -> bool:
    """True if a file of this tree defines a name."""
    if not (ROOT / path).is_file():
        return False
    if path.endswith(".py"):
        return name in names_in(Path(path))
    return re.search(rf"\b{re.escape(name)}\b", (ROOT / path).read_text(encoding="utf-8")) is not None


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next one of any level."""
    return re.split(r"^#+ ", text_of(Path(page)).split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]


def tree(page: str) -> list[str]:
    """The lines of the tree that a page draws."""
    return [line for line in section(page, "The tree").splitlines() if line.startswith("    ")]


def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading():
    links = [(page, link) for page in PAGES for link in links_of(page)]
    assert len(links) > 60
    for page, link in links:
        path, _, anchor = urllib.parse.unquote(link).partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors_of(target.resolve().relative_to(ROOT)), f"{page}: {link}"


def test_every_function_and_test_that_is_named_exists():
    named = [(page, *each) for page in PAGES for each in NAMED.findall(text_of(page))]
    assert [each for each in named if not defines(*each[1:])] == []


def test_every_path_that_is_named_exists():
    spans = [(page, span) for page in PAGES if page != SAMPLES for span in SPAN.findall(text_of(page))]
    paths = [(page, span) for page, span in spans if PATH.fullmatch(span) and not re.search("NAME|/out/", span)]
    assert [each for each in paths if not any((start / each[1]).exists() for start in (ROOT, (ROOT / each[0]).parent))] == []


LONGEST = {"README.md": 140, "model/README.md": 250, "service/README.md": 250, "loadtest/README.md": 250}
"""Lines of a guide at most: what is longer has a page of its own."""


def test_a_guide_is_short():
    lengths = {page: len((ROOT / page).read_text(encoding="utf-8").splitlines()) for page in LONGEST}
    assert {page: length for page, length in lengths.items() if length > LONGEST[page]} == {}


def too_long(text: str) -> list[str]:
    """Lines of prose that are too long. Tables, code, and single words, such as addresses of links, have no limit."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    "))]
    return [line for line in lines if len(line) > WIDTH and len(re.sub("`[^`]*`", "x", line).split()) > 1]


def test_no_line_of_prose_is_longer_than_a_screen_is_wide():
    found = {page: too_long((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    assert {page: lines for page, lines in found.items() if lines} == {}, "python -m tests.wrap PAGE"


def test_every_name_in_a_tree_exists():
    parents: dict[int, Path] = {}
    for line in (line for page in ("README.md", "model/README.md", "service/README.md") for line in tree(page)):
        depth, names = (len(line) - len(line.lstrip()) - 4) // 2, re.match(r"\s+(\S+(?: \S+\.py| \S+/)*)", line)
        assert names is not None
        parent = parents.get(depth - 1, ROOT)
        for name in names[1].split():
            assert (parent / name).exists(), line
        parents[depth] = parent / names[1].split()[0]


def found_in(pattern: str) -> dict[str, Path]:
    """What a pattern finds in the pages, code between fences too, and a page that has it. A command of an earlier commit,
    `command` of `commit`, is left out.
    """
    texts = {page: re.sub(r"`[^`]*`\s+of\s+`[0-9a-f]{8}`", "", (ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    return {found: page for page, text in texts.items() for found in re.findall(pattern, text, re.MULTILINE)}


def test_every_verb_that_is_named_is_in_the_makefile():
    verbs = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = found_in(r"(?:`|^ *)make ([a-z][\w-]*)")
    assert "serve" in named and {verb: page for verb, page in named.items() if verb not in verbs} == {}


def test_every_command_that_is_named_is_one_of_attends():
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    named = found_in(r"(?:`|^ *)attend ([a-z]+)")
    assert "serve" in named and {name: page for name, page in named.items() if name not in commands} == {}


FLAG = re.compile(r"(?<=\s)--?[a-z][\w-]*")


def flags_of(words: list[str]) -> set[str] | None:
    """The flags of a command of Attend that begins with these words; None where it is none, or takes any."""
    command = get_command(app)
    for word in words:
        if not isinstance(command, TyperGroup):
            break
        if word not in command.commands:
            return None
        command = command.commands[word]
    if isinstance(command, TyperGroup) or "bench" in words[:1]:
        return None
    return {"--help", "-h", *(flag for each in command.params for flag in (*each.opts, *each.secondary_opts))}


def test_every_flag_of_a_command_is_one_of_its_own():
    for typed, page in found_in(r"(?:`|^ *)attend ([a-z](?:\\\n|[^`\n|#;])*)").items():
        known = flags_of(typed.split())
        assert known is None or set(FLAG.findall(typed)) <= known, f"{page}: attend {typed}"


def test_nobody_is_told_to_install_another_project():
    """On package indexes `attend` is somebody else's; ours is attend-server, and its files begin with attend_server."""
    files = [ROOT / "pyproject.toml", *(ROOT / page for page in PAGES)]
    files += [path for room in ("model", "service", "loadtest", "deploy") for path in (ROOT / room).rglob("*.py")]
    told = {
        path: re.findall(r"(?:pip install|uvx|pipx run) (?!--from WHEEL)[^\n`]*\battend(?![-_]server)[\w\[]*", path.read_text())
        for path in files
    }
    assert {path: each for path, each in told.items() if each} == {}
