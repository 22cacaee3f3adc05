"""How much there is to read: `python -m tests.weight` prints it by package; `--write` lowers the bounds in weight.csv."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, BOUNDS = ROOT / "CONTRIBUTING.md", ROOT / "tests/weight.csv"
MARKED = re.compile(r"(<!-- begin weight -->\n).*?(<!-- end weight -->)", re.DOTALL)
TEXT = {
    ".py",
    ".pyi",
    ".h",
    ".cpp",
    ".js",
    ".css",
    ".html",
    ".j2",
    ".jinja",
    ".yaml",
    ".yml",
    ".json",
    ".toml",
    ".proto",
    ".sh",
    ".txt",
    ".tpl",
}
MADE = re.compile(
    r"_pb2|golden/|/default/|dashboard\.json|schema\.json|requirements\.txt|constraints\.txt|tests/real/.*json|package.*\.json"
)
"""What a program writes, or what only names versions: nobody reads it as a text."""
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass
class Weight:
    """What one package holds. `tokens` counts every hand-written text: code, and the words of strings and templates."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    names: int = 0
    words: int = 0
    functions: list[int] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count one file."""
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            self.words += len(MARKED.sub("", text).split())
            return
        self.tokens += len(python_tokens(text)) if path.suffix == ".py" else len(WORD.findall(text))
        if path.suffix == ".py":
            self.files += 1
            self.lines += text.count("\n")
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self.names += not node.name.startswith("_")
                    if not isinstance(node, ast.ClassDef):
                        self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)

    def bounds(self) -> list[int]:
        """What is bounded: lines of Python, tokens, words of Markdown."""
        return [self.lines, self.tokens, self.words]


def python_tokens(text: str) -> list[str]:
    """The tokens of a module; a string counts as its words, so that code in strings is no way to be small."""
    found: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT:
            continue
        is_text = token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
        found += WORD.findall(token.string) if is_text else [token.string]
    return found


def package_of(name: str) -> str:
    """The package that a file of the tree counts for, such as `service/runtime`."""
    folders = name.split("/")[:-1]
    return "/".join(folders[:2]) or "."


def weights() -> dict[str, Weight]:
    """By package: what its tracked files hold. Links, generated files and data are left out."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found: dict[str, Weight] = {}
    for name in filter(None, listed):
        path = ROOT / name
        if path.suffix in TEXT | {".md"} and path.is_file() and not path.is_symlink() and not MADE.search(name):
            found.setdefault(package_of(name), Weight()).add(path)
    return dict(sorted(found.items()))


def summed(by_package: dict[str, Weight]) -> dict[str, Weight]:
    """The product and its tests, each as one."""
    sums = {"product": Weight(), "tests": Weight()}
    for name, each in by_package.items():
        into = sums["tests" if name.split("/")[0] == "tests" else "product"]
        for key in ("files", "lines", "tokens", "names", "words", "functions"):
            setattr(into, key, getattr(into, key) + getattr(each, key))
    return sums


def bounds(text: str) -> dict[str, list[int]]:
    """By package: the bounds of weight.csv."""
    rows = [line.split(",") for line in text.splitlines()[1:]]
    return {name: [int(cell) for cell in cells] for name, *cells in rows}


def lowered(old: dict[str, list[int]], new: dict[str, list[int]]) -> dict[str, list[int]]:
    """The bounds of what is here: never above those of before. A new package brings its own."""
    return {name: [min(pair) for pair in zip(old.get(name, row), row, strict=True)] for name, row in new.items()}


def table(rows: dict[str, list[int]]) -> str:
    """Bounds as weight.csv has them."""
    return "package,lines of Python,tokens,words of Markdown\n" + "".join(
        f"{name},{','.join(map(str, row))}\n" for name, row in rows.items()
    )


def sums(found: dict[str, Weight]) -> str:
    """What the page says of the whole tree."""
    product, tests = summed(found).values()
    files = f"{product.files:,} files, {product.lines:,} lines and {product.tokens:,} tokens"
    words = product.words + tests.words
    return f"The product has {files} of Python; the tests {tests.lines:,} lines. All pages: {words:,} words.\n"


def main() -> None:
    """Print the weight by package, and lower the bounds where `--write` is there."""
    found = weights()
    print(f"{'':24}{'files':>8}{'lines':>10}{'tokens':>12}{'names':>8}{'words':>9}{'longest':>9}{'median':>8}")
    for name, each in {**found, **summed(found)}.items():
        *figures, functions = astuple(each)
        median = sorted(functions)[len(functions) // 2] if functions else 0
        print(
            "".join(
                (
                    f"{name:24}",
                    *map(_column, figures, (8, 10, 12, 8, 9)),
                    _column(max(functions, default=0), 9),
                    _column(median, 8),
                )
            )
        )
    if "--write" in sys.argv:
        rows = lowered(bounds(BOUNDS.read_text(encoding="utf-8")), {name: each.bounds() for name, each in found.items()})
        BOUNDS.write_text(table(rows), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(MARKED.sub(partial(_filled, sums(found)), page), encoding="utf-8")


def _column(figure: int, width: int) -> str:
    return f"{figure:>{width},}"


def _filled(text: str, match: re.Match[str]) -> str:
    return f"{match[1]}{text}{match[2]}"


if __name__ == "__main__":
    main()
