"""The pages have the tables that `make docs` writes, and the clients have the fields of the contract."""

import pytest

from tests.docs import ROOT, TABLES, WHOLE, written


@pytest.mark.parametrize("name", [*TABLES, *WHOLE])
def test_a_file_is_as_make_docs_writes_it(name):
    assert (ROOT / name).read_text(encoding="utf-8") == written(name), "run `make docs`, and read what git shows"
