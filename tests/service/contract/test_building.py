"""Shapes are built when they are first asked for, by one thread each: a start does not wait for all of them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from attend.service.contract.shapes import Shape, build_all, optional_field

SEEN = """
import attend.service.http_api.openapi
from attend.service.contract.shapes import Shape
found = [Shape]
for kind in found:
    found += kind.__subclasses__()
print(len(found), sum(kind.__pydantic_complete__ for kind in found[1:]))
"""


def test_an_import_builds_no_shape():
    count, complete = map(int, subprocess.check_output([sys.executable, "-P", "-c", SEEN], text=True).split())
    assert count > 20 and complete == 0


def test_a_shape_is_whole_whoever_asks_first():
    """Its parent takes no field: a validator that is inherited would refuse them all."""

    class Body(Shape):
        """A body."""

        one: int | None = optional_field()
        two: str | None = optional_field()

    barrier = Barrier(8)

    def read(_: int) -> Body:
        barrier.wait()
        return Body.read({"one": 1, "two": "b"})

    with ThreadPoolExecutor(8) as threads:
        assert all((body.one, body.two) == (1, "b") for body in threads.map(read, range(8)))


def test_all_are_built_beside_what_serves():
    build_all()
    found = [Shape]
    for kind in found:
        found += kind.__subclasses__()
    assert all(kind.__pydantic_complete__ for kind in found[1:])
