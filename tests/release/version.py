"""The version, from pyproject.toml alone: `python -m tests.release.version [TAG] [--notes]`. No package is needed.

It prints the version, or with `--notes` what CHANGELOG.md says of it. With a tag it ends with status 1 where the tag is another
version's, or the newest release in CHANGELOG.md is.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})\n", re.MULTILINE)
"""The heading of a release in CHANGELOG.md, newest first: `## 0.1.0 - 2027-01-31`."""


def version(root: Path = ROOT) -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def releases(root: Path = ROOT) -> dict[str, str]:
    """What CHANGELOG.md says of each release, by its version, in the order of the file."""
    _, *parts = RELEASE.split((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    return dict(zip(parts[::3], (words.strip() for words in parts[2::3]), strict=True))


def notes(tag: str, root: Path = ROOT) -> str:
    """What CHANGELOG.md says of the release with this tag; a ValueError where tag, pyproject.toml and changelog differ."""
    ours, written = version(root), releases(root)
    if tag != f"v{ours}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml has {ours}, whose tag is v{ours}")
    newest = next(iter(written), "none")
    if newest != ours:
        raise ValueError(f"the newest release in CHANGELOG.md is {newest}, and pyproject.toml has {ours}")
    if not written[ours]:
        raise ValueError(f"CHANGELOG.md says nothing of {ours}")
    return written[ours]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tag", nargs="?")
    parser.add_argument("--notes", action="store_true", help="print what CHANGELOG.md says of the tag's release")
    arguments = parser.parse_args()
    if arguments.notes and not arguments.tag:
        parser.error("--notes needs a tag")
    try:
        words = notes(arguments.tag) if arguments.tag else ""
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(words if arguments.notes else version())
    return 0


if __name__ == "__main__":
    sys.exit(main())
