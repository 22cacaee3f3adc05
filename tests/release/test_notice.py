"""NOTICE names what the wheel holds of other projects, and the wheel's build takes it along."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTICE = (ROOT / "NOTICE").read_text()
TEXTS = (".py", ".js", ".css", ".html", ".cpp", ".h", ".j2", ".proto", ".txt")
FOREIGN = re.compile(r"@license|copyright \(c\)|copyright \d{4}", re.IGNORECASE)
STATIC = ROOT / "service/http_api/static"


def test_every_file_under_another_licence_is_named():
    files = [path for folder in ("model", "service", "protos") for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    foreign = [f"attend/{path.relative_to(ROOT)}" for path in files if FOREIGN.search(path.read_text(encoding="utf-8"))]
    assert "attend/service/http_api/static/markdown-it.js" in foreign
    assert [path for path in foreign if path not in NOTICE] == []


def test_it_names_each_package_inside_and_the_version():
    licences = (STATIC / "markdown-it.LICENSE.txt").read_text()
    packages = re.findall(r"^== (\S+) ==$", licences, re.MULTILINE)
    assert len(packages) > 1
    assert [name for name in packages if name not in NOTICE] == []
    [version] = re.findall(r"^/\*! markdown-it (\S+) ", (STATIC / "markdown-it.js").read_text())
    assert f"markdown-it {version}" in NOTICE
    assert f"markdown-it {version}," in licences


def test_the_origin_of_the_shipped_model_is_told():
    page = (ROOT / "model/default/README.md").read_text()
    [library] = re.findall(r"standard library of (CPython [\d.]+)", page)
    assert library in re.sub(r"\s+", " ", NOTICE)
