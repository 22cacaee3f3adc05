"""The pages have the tables that `make docs` writes, and the clients have the fields of the contract."""

from tests.docs import ROOT, TABLES, WHOLE, written


def test_each_file_is_as_make_docs_writes_it():
    old = [name for name in (*TABLES, *WHOLE) if (ROOT / name).read_text(encoding="utf-8") != written(name)]
    assert old == [], "run `make docs`, and read what git shows"
