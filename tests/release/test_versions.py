"""One version, in pyproject.toml: all that names it follows; no other tag is released."""

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.release.version import RELEASE, notes, releases, version

ROOT = Path(__file__).parents[2]
VERSION = version()
TAG = re.compile(r"\battend(?::|_server-)(\d+\.\d+\.\d+)|newTag: (\d+\.\d+\.\d+)|image\.version=\"(\d+\.\d+\.\d+)\"")
"""The version in the name of an image or of a wheel."""


def places():
    """(file, version) of each image and wheel that is named with one."""
    files = [ROOT / "compose.yaml", *ROOT.glob("*.md"), *(ROOT / "attend").glob("*.md"), *(ROOT / "deploy").rglob("*")]
    for path in files:
        if path.is_file() and path.name != "CHANGELOG.md" and path.suffix != ".pyc":
            for found in TAG.finditer(path.read_text(encoding="utf-8")):
                yield str(path.relative_to(ROOT)), next(filter(None, found.groups()))


def test_every_image_and_wheel_is_named_with_the_version():
    found = [*places()]
    assert {path for path, _ in found} >= {"compose.yaml", "README.md", "deploy/docker/Dockerfile", "deploy/README.md"}
    assert [(path, each) for path, each in found if each != VERSION] == []


def test_no_image_is_named_latest():
    texts = [ROOT / "compose.yaml", *(ROOT / "deploy").rglob("*.yaml")]
    assert [str(path) for path in texts if re.search(r"(image|newTag).*latest", path.read_text())] == []


def test_the_newest_release_of_the_changelog_is_the_version_and_the_releases_go_down():
    """Before the first release there is none."""
    written = releases()
    assert next(iter(written), VERSION) == VERSION
    numbers = [tuple(map(int, each.split("."))) for each in written]
    assert numbers == sorted(numbers, reverse=True)


def test_the_changelog_has_headings_of_releases_and_one_of_what_is_not_released():
    text = (ROOT / "CHANGELOG.md").read_text()
    others = [line for line in text.splitlines() if line.startswith("## ") and not RELEASE.match(f"{line}\n")]
    assert others == ["## Unreleased"]
    for _, date in RELEASE.findall(text):
        assert datetime.date.fromisoformat(date)


def test_a_chart_has_the_version():
    for path in (ROOT / "deploy").rglob("Chart.yaml"):
        chart = yaml.safe_load(path.read_text())
        assert (str(chart["version"]), str(chart["appVersion"])) == (VERSION, VERSION)


def tree(folder, number, changelog):
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{number}"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    return folder


RELEASED = "# Changelog\n\n## Unreleased\n\n- Later.\n\n## 0.2.0 - 2027-03-01\n\n- New.\n\n## 0.1.0 - 2027-01-01\n\n- First.\n"


def test_the_words_of_a_release_are_those_under_its_heading(tmp_path):
    assert notes("v0.2.0", tree(tmp_path, "0.2.0", RELEASED)) == "- New."


@pytest.mark.parametrize(
    ("tag", "number", "changelog", "why"),
    [
        ("0.2.0", "0.2.0", RELEASED, "the tag is 0.2.0"),
        ("v0.2.1", "0.2.0", RELEASED, "the tag is v0.2.1"),
        ("v0.1.0", "0.2.0", RELEASED, "the tag is v0.1.0"),
        ("v0.3.0", "0.3.0", RELEASED, r"the newest release in CHANGELOG.md is 0\.2\.0"),
        ("v0.1.0", "0.1.0", RELEASED, r"the newest release in CHANGELOG.md is 0\.2\.0"),
        ("v0.1.0", "0.1.0", "# Changelog\n\n## Unreleased\n\n- New.\n", "the newest release in CHANGELOG.md is none"),
        ("v0.1.0", "0.1.0", "## 0.1.0 - 2027-01-01\n\n", "CHANGELOG.md says nothing of 0.1.0"),
    ],
)
def test_a_tag_that_is_no_release_is_refused(tmp_path, tag, number, changelog, why):
    with pytest.raises(ValueError, match=why):
        notes(tag, tree(tmp_path, number, changelog))


def test_the_command_needs_no_package_and_prints_the_version(tmp_path):
    """It runs in workflows before anything is installed."""
    shutil.copytree(ROOT / "tests/release", tmp_path / "tests/release")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(RELEASED)
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys; sys.path.insert(0, '.'); import runpy; runpy.run_module('tests.release.version', run_name='__main__')",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{VERSION}\n", "")
    refused = subprocess.run([*command, "v9.9.9"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the tag is v9.9.9" in refused.stderr
