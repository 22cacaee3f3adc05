"""The bounds of pyproject.toml are versions that `make test-bounds` runs; other versions are told in a sentence."""

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from attend.model.net import packed_linears
from attend.service import tested_versions as bounds
from attend.service.commands import start
from attend.service.settings import Settings
from tests.deploy.manifests import constraint

ROOT = Path(__file__).parents[2]
NEEDED = [Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
BOUNDED = {each.name: each.specifier for each in NEEDED if each.specifier}


def versions(end: str) -> dict[str, Version]:
    lines = (ROOT / "tests/bounds" / f"{end}.txt").read_text().splitlines()
    return {name: Version(number) for name, number in (line.split("==") for line in lines if not line.startswith("#"))}


LOWEST, NEWEST = versions("lowest"), versions("newest")


@pytest.mark.parametrize("name", BOUNDED)
def test_both_ends_of_each_bound_are_run_and_the_pinned_version_lies_between(name):
    newest = NEWEST[name]
    assert str(BOUNDED[name]) == f"<{newest.major}.{newest.minor + 1},>={str(LOWEST[name]).removesuffix('.0')}"
    assert LOWEST[name] <= Version(constraint(name)) <= newest


def test_what_depends_on_private_names_is_bounded():
    assert {*LOWEST} == {*NEWEST} == {*BOUNDED} == {"torch", "ray", "uvicorn", "pydantic"}


if "ATTEND_TEST_BOUNDS" in os.environ:  # as `make test-bounds` sets it

    def test_these_versions_are_installed():
        wanted = versions(os.environ["ATTEND_TEST_BOUNDS"])
        assert {name: Version(importlib.metadata.version(name).partition("+")[0]) for name in wanted} == wanted


@pytest.fixture
def installed(monkeypatch):
    """Sets the version that a package seems to have."""
    found = {name: str(version) for name, version in NEWEST.items()}
    monkeypatch.setattr(bounds, "version", found.__getitem__)
    extra = 'triton<4; extra == "gpu"'
    monkeypatch.setattr(bounds, "requires", lambda name: [*(f"{each}{BOUNDED[each]}" for each in BOUNDED), "numpy", extra])
    bounds.untested_packages.cache_clear()
    yield found
    bounds.untested_packages.cache_clear()


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1"])
def test_a_tested_version_is_not_told(installed, version):
    installed["torch"] = version
    assert bounds.untested_packages() == ()


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0", "2.16.0.dev20261101+cu130"])
def test_an_untested_version_is_told_in_one_line_before_a_command_computes(installed, version, capsys, monkeypatch):
    installed["torch"] = version
    monkeypatch.setattr(start, "provide", lambda say: None)
    start.prepare_settings(Settings())
    told = capsys.readouterr().err
    assert told == f"attend: torch {version} is installed, and Attend was tested with <2.15,>=2.13\n"


def test_a_torch_without_the_private_operations_computes_plainly_and_says_so(monkeypatch, caplog):
    class Other:
        _reorder_linear_weight = None

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", Other())
    packed_linears._has_operations.cache_clear()
    try:
        assert [packed_linears.multiplies_bfloat16() for _ in range(2)] == [False, False]
    finally:
        packed_linears._has_operations.cache_clear()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith(" has no mkldnn _is_mkldnn_bf16_supported, _linear_pointwise: the torch backend computes more slowly")
