"""The wheel holds no file of another project, and NOTICE names what the shipped model was trained on."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTICE = (ROOT / "NOTICE").read_text()
TEXTS = (".py", ".js", ".css", ".html", ".cpp", ".h", ".j2", ".proto", ".txt")
FOREIGN = re.compile(r"@license|copyright \(c\)|copyright \d{4}", re.IGNORECASE)


def test_no_file_is_of_another_project():
    files = [path for folder in ("model", "service", "protos") for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    assert len(files) > 100
    assert [path for path in files if FOREIGN.search(path.read_text(encoding="utf-8"))] == []


def test_the_origin_of_the_shipped_model_is_told():
    page = (ROOT / "model/default/README.md").read_text()
    [library] = re.findall(r"standard library of (CPython [\d.]+)", page)
    assert library in re.sub(r"\s+", " ", NOTICE)
