"""The lock of the images: the pinned versions, everything that is needed, each file by its SHA-256. No index is asked."""

import re
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.lock import LOCK, ROOT, locked, named

LINE = re.compile(r"([a-z0-9-]+)==([\w.]+)((?: --hash=sha256:[0-9a-f]{64}){1,2})")
LINES = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


def names():
    return {line.partition("==")[0] for line in LINES}


def test_every_line_is_a_version_and_one_or_two_files():
    assert [line for line in LINES if not LINE.fullmatch(line)] == []
    assert [line.partition("==")[0] for line in LINES] == sorted(names())


def test_the_versions_are_those_that_are_pinned():
    found = dict(LINE.fullmatch(line).groups()[:2] for line in LINES)
    assert found == {name: PINNED.get(name) for name in found}, "python -m tests.release.lock"


def test_everything_that_is_named_is_there_and_what_those_need():
    """By what is installed here, for Linux and this Python."""
    needed, wanted = set(), [Requirement(each) for each in named()]
    while wanted:
        one = wanted.pop()
        for extra in one.extras or {""}:
            if one.marker and not one.marker.evaluate({"extra": ""}):
                continue
            name = canonicalize_name(one.name)
            if (name, extra) in needed:
                continue
            needed.add((name, extra))
            try:
                below = [Requirement(each) for each in requires(name) or []]
            except PackageNotFoundError:
                pytest.fail(f"the package {name} is not installed")
            for each in below:
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    each.marker = None
                    wanted.append(each)
    assert {name for name, _ in needed} - {"torch"} - names() == set(), "python -m tests.release.lock"


def test_a_package_has_one_hash_where_both_machines_take_the_same_file():
    both = {"x86_64": {"a": ("1", "00"), "b": ("2", "11")}, "aarch64": {"a": ("1", "00"), "b": ("2", "22"), "c": ("3", "33")}}
    assert locked(both).splitlines()[-3:] == [
        "a==1 --hash=sha256:00",
        "b==2 --hash=sha256:11 --hash=sha256:22",
        "c==3 --hash=sha256:33",
    ]


def test_two_versions_of_a_package_are_no_lock():
    with pytest.raises(ValueError, match="too many values"):
        locked({"x86_64": {"a": ("1", "00")}, "aarch64": {"a": ("2", "11")}})


def test_the_lock_takes_the_place_of_the_stage_that_the_dockerfile_copies_from():
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    workflow = (ROOT / ".github/workflows/images.yaml").read_text()
    assert "COPY --from=needs /src/requirements.txt ./\nRUN pip install -c constraints.txt -r requirements.txt" in dockerfile
    assert 'cp deploy/docker/requirements.txt "$RUNNER_TEMP/needs/src"' in workflow
    assert '--build-context "needs=$RUNNER_TEMP/needs"' in workflow
