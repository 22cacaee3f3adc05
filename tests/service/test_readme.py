"""service/API.md is the specification: the routes that it lists are all that there are."""

import re
from pathlib import Path

import pytest

from tests.service.server import Server

SERVICE = (Path(__file__).parents[2] / "service/API.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """What stands below a heading of service/API.md, with the smaller headings in it."""
    return re.split(r"^## ", SERVICE.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.ray
def test_every_route_in_the_page_answers(server: Server) -> None:
    routes = re.findall(r"`(/[\w./]*)`|`(?:GET|POST) (/[\w./]*)`", section("HTTP").split("### Fields")[0])
    assert len(routes) > 12
    for route in routes:
        path = "".join(route)
        status, body = server.get(path)
        assert status in (200, 405) or (status == 404 and "the setting batch_folder" in body), path
