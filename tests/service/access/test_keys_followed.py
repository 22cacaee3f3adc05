"""How often the key file is looked at, second after second."""

import pytest

from attend.model.errors import Unauthenticated
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys


def test_the_file_is_looked_at_once_in_each_second_and_no_more_often(tmp_path):
    path, now = tmp_path / "keys.json", 1000.0
    write_keys(path, {"ci": Entry(digest_of(b"att_0"))})
    ring = KeyRing(path, lambda: now)
    for second in range(1, 5):
        write_keys(path, {"ci": Entry(digest_of(f"att_{second}".encode()))})
        now += 0.875
        assert ring.authenticate(f"Bearer att_{second - 1}").name == "ci", "looked at too soon"
        now += 0.125
        assert ring.authenticate(f"Bearer att_{second}").name == "ci"
        with pytest.raises(Unauthenticated):
            ring.authenticate(f"Bearer att_{second - 1}")
