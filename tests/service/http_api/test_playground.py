"""The pages need nothing but this server, cannot run what they show, and go off together."""

import asyncio
import hashlib
import json
import math
import re
import tomllib
from pathlib import Path

import httpx
import pytest

from attend.service.access.keys import KeyRing
from attend.service.chat.forms import form_of
from attend.service.chat.prompt import EFFORTS
from attend.service.chat.tools import CHOICES
from attend.service.http_api.app import build_app
from attend.service.http_api.openapi import schemas
from attend.service.http_api.playground import PAGES, STATIC
from attend.service.http_api.route_deps import RouteDeps
from tests.fakes import build_server
from tests.service.contract.asked import calling_of

ROOT = Path(__file__).parents[3]
FILES = sorted(STATIC.iterdir())
INDEX = (STATIC / "index.html").read_text()
NUMBER = re.compile(r'<input id="(\w+)" type="number"([^>]*)>')
PATHS = [*PAGES, *(f"/static/{file.name}" for file in FILES if file.suffix != ".html")]
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
each_path = pytest.mark.parametrize("path", PATHS)
SECRET = "at-" + "k" * 40


async def scrape() -> str:
    return ""


def app_with_keys(folder: Path):
    (folder / "keys").write_text(json.dumps({"ci": {"sha256": hashlib.sha256(SECRET.encode()).hexdigest()}}))
    (folder / "keys").chmod(0o600)
    server = build_server()
    return build_app(RouteDeps(server.service, server.metrics, "1.2.3", scrape, lambda: False, keys=KeyRing(folder / "keys")))


def get(app, path: str, **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://attend") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(call())


@each_path
def test_every_page_and_file_has_a_policy_that_lets_it_reach_this_server_alone(path):
    answer = get(build_server().app, path)
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-dns-prefetch-control"] == "off"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/static/page.css", "text/css; charset=utf-8"),
        ("/static/common.js", "text/javascript; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml"),
    ],
)
def test_a_file_says_what_it_is(path, kind):
    assert get(build_server().app, path).headers["content-type"] == kind


@each_file
def test_no_file_names_another_host(file):
    """The one address is SVG's namespace, which nobody fetches."""
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?|wss?)://|[\"'(]//|@import|@font-face", text)


@each_file
def test_no_file_makes_markup_or_code_of_text(file):
    text = file.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser|srcdoc", text)
    if file.suffix == ".html":
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)|javascript:", text)


def test_the_ranges_of_the_page_are_those_of_the_api():
    """The field of a parameter has its name; one without a lower end begins a step above it."""
    fields = {name: dict(re.findall(r'(min|max)="([^"]*)"', rest)) for name, rest in NUMBER.findall(INDEX)}
    assert {"temperature", "max_tokens", "top_p", "top_k", "min_p", "presence_penalty", "min_tokens"} <= fields.keys()
    known = schemas()["CompletionRequest"]["properties"]
    for name, shown in fields.items():
        limits = known[name]
        assert float(shown["min"]) > limits.get("exclusiveMinimum", -math.inf), name
        assert float(shown["min"]) == max(
            limits.get("minimum", float(shown["min"])), 1 if name == "max_tokens" else -math.inf
        ), name
        assert ("max" in shown) == (limits["maximum"] < 2**31 - 1), name
        assert "max" not in shown or float(shown["max"]) == limits["maximum"], name


def options(field: str) -> list[str]:
    """The values that a field of the page offers."""
    listed = INDEX.partition(f'<select id="{field}"')[2].partition("</select>")[0]
    return [value or text for value, text in re.findall(r'<option(?: value="(\w*)")?>([^<]*)', listed)]


def test_the_choices_of_the_page_are_those_of_the_api():
    assert options("tool_choice") == list(CHOICES)
    assert options("reasoning_effort")[1:] == list(EFFORTS)


def test_the_example_of_the_page_is_a_list_of_tools():
    example = re.search(r"EXAMPLE = `(.*?)`", (STATIC / "tools.js").read_text(), re.DOTALL)
    read = calling_of(json.loads(example[1]), None, None, form_of("", "hermes", "none"))
    named = {tool.name: sorted(tool.parameters["properties"]) for tool in read.tools}
    assert named == {"get_weather": ["city", "unit"], "add": ["a", "b"]}


def test_the_pictures_are_small():
    pictures = list((Path(__file__).parents[1] / "screenshots").iterdir())
    assert {picture.name for picture in pictures} == {"chat.png", "explorer.png"}
    assert max(picture.stat().st_size for picture in pictures) < 60_000


def test_whatever_a_page_names_is_served():
    named = {name for file in FILES for name in re.findall(r"static/([\w.-]+)|from \"\./([\w.-]+)\"", file.read_text())}
    wanted = {f"/static/{one or other}" for one, other in named}
    assert wanted == {path for path in PATHS if path.startswith("/static/")}


@each_path
def test_the_pages_are_off_together_with_the_docs(path):
    assert get(build_server(expose_docs=False).app, path).status_code == 404


@pytest.mark.parametrize(
    "path", ["/static/", "/static/index.html", "/static/nothing.js", "/static/../playground.py", "/static/%2e%2e/playground.py"]
)
def test_nothing_else_is_served_as_a_file(path):
    assert get(build_server().app, path).status_code == 404


def test_with_keys_the_pages_are_open_and_the_document_is_not(tmp_path):
    app = app_with_keys(tmp_path)
    assert {get(app, path).status_code for path in PATHS} == {200}
    assert get(app, "/openapi.json").status_code == 401
    document = get(app, "/openapi.json", authorization=f"Bearer {SECRET}").json()
    assert "/v1/completions" in document["paths"]


def test_the_files_are_part_of_the_package():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "http_api/static/*" in data["attend.service"]
