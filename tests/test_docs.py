"""The pages have the tables that `make docs` writes."""

from tests.docs import ROOT, TABLES, written


def test_each_file_is_as_make_docs_writes_it():
    old = [name for name in TABLES if (ROOT / name).read_text(encoding="utf-8") != written(name)]
    assert old == [], "run `make docs`, and read what git shows"
