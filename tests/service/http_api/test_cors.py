"""A page of another origin may call only where the server was told so."""

import httpx
import pytest

from attend.service.access.keys import Entry, KeyRing, Limits, digest_of, write_keys
from attend.service.http_api.body import MAX_BYTES
from attend.service.http_api.cors import cors_headers
from attend.service.http_api.request_ids import MAX_HEADER_BYTES
from tests.fakes import FakeEngine, build_server

OPENAI = (
    "authorization,content-type,last-event-id,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)
ASK = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}


def call(origins: tuple[str, ...], method: str, headers: dict[str, str]) -> httpx.Response:
    return build_server(cors_origins=origins).ask(method, "/v1/completions", headers=headers, json={"prompt": "a"})


def test_no_origin_is_let_in_by_default():
    assert 405 == call((), "OPTIONS", ASK).status_code
    assert "access-control-allow-origin" not in call((), "POST", ASK).headers


@pytest.mark.parametrize("origins", [("https://page.example",), ("https://other.example", "https://page.example")])
def test_an_origin_that_is_named_may_send_every_header_that_openais_client_sends_and_read_all(origins):
    asked = ASK | {"Access-Control-Request-Headers": OPENAI}
    before = call(origins, "OPTIONS", asked)
    assert (200, "https://page.example") == (before.status_code, before.headers["access-control-allow-origin"])
    assert OPENAI == before.headers["access-control-allow-headers"]
    answer = call(origins, "POST", ASK)
    assert 200 == answer.status_code
    assert ("*", "Origin") == (answer.headers["access-control-expose-headers"], answer.headers["vary"])


@pytest.mark.parametrize(
    ("origins", "status"),
    [((ASK["Origin"],), 200), (("*",), 400), (("*", ASK["Origin"]), 400), (("https://other.example",), 400)],
)
def test_a_public_page_reaches_a_private_network_where_its_origin_is_named(origins, status):
    before = call(origins, "OPTIONS", ASK | {"Access-Control-Request-Private-Network": "true"})
    assert before.status_code == status
    granted = {"access-control-allow-private-network", "access-control-allow-origin"} <= before.headers.keys()
    assert granted == (status == 200)


ERRORS = {
    400: {"json": {"prompt": 7}},
    401: {"json": {"prompt": "a"}},
    404: {"url": "/v1/nothing"},
    405: {"method": "GET"},
    413: {"content": b" " * (MAX_BYTES + 1), "headers": ASK | {"content-type": "application/json"}},
    415: {"content": b"{}", "headers": ASK | {"content-type": "text/plain"}},
    431: {"json": {"prompt": "a"}, "headers": ASK | {"x-long": "a" * (MAX_HEADER_BYTES + 1)}},
    500: {"json": {"prompt": "a"}},
}


@pytest.mark.parametrize("status", ERRORS)
async def test_an_error_of_any_kind_may_be_read_by_the_page(status, tmp_path):
    asked, engine, keys = {"method": "POST", "url": "/v1/completions", "headers": ASK} | ERRORS[status], FakeEngine(), None
    if status == 500:
        engine.refusal = ZeroDivisionError()
    if status == 401:
        write_keys(tmp_path / "keys", {"ci": Entry(digest_of(b"att_secret"), Limits())})
        keys = KeyRing(tmp_path / "keys")

    async with build_server(engine, cors_origins=("*",), keys=keys).http() as client:
        answer = await client.request(**asked)
    assert (status, "*") == (answer.status_code, answer.headers["access-control-allow-origin"])
    assert "*" == answer.headers["access-control-expose-headers"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "a", None),
        (("*",), None, "*"),
        (("*",), "a", "*"),
        (("a", "b"), "b", "b"),
        (("a",), "b", None),
        (("a",), None, None),
    ],
)
def test_an_answer_beside_the_application_tells_of_the_origin_alike(origins, origin, allowed):
    fields = cors_headers(origins, origin)
    assert allowed == fields.get("access-control-allow-origin")
    assert bool(fields) == bool(allowed)
    assert ("vary" in fields) == (allowed not in (None, "*"))
