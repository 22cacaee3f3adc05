"""A page of another origin may call only where the server was told so."""

import asyncio

import httpx
import pytest

from tests.fakes import build_server

ASK = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}


def call(origins: tuple[str, ...], method: str, headers: dict[str, str]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with build_server(cors_origins=origins).http() as client:
            return await client.request(method, "/v1/completions", headers=headers, json={"prompt": "a"})

    return asyncio.run(run())


def test_no_origin_is_let_in_by_default():
    assert 405 == call((), "OPTIONS", ASK).status_code
    assert "access-control-allow-origin" not in call((), "POST", ASK).headers


@pytest.mark.parametrize("origins", [("https://page.example",), ("https://other.example", "https://page.example")])
def test_an_origin_that_is_named_may_send_keys_and_read_the_request_id(origins):
    asked = ASK | {"Access-Control-Request-Headers": "authorization, content-type, last-event-id"}
    before = call(origins, "OPTIONS", asked)
    assert (200, "https://page.example") == (before.status_code, before.headers["access-control-allow-origin"])
    answer = call(origins, "POST", ASK)
    assert 200 == answer.status_code
    assert "X-Request-Id" == answer.headers["access-control-expose-headers"]


def test_another_origin_is_not_let_in():
    before = call(("https://other.example",), "OPTIONS", ASK)
    assert 400 == before.status_code
    assert "access-control-allow-origin" not in before.headers


def test_an_error_too_may_be_read_by_the_page():
    async def run() -> httpx.Response:
        async with build_server(cors_origins=("*",)).http() as client:
            return await client.post("/v1/completions", headers=ASK, json={"prompt": 7})

    answer = asyncio.run(run())
    assert (400, "*") == (answer.status_code, answer.headers["access-control-allow-origin"])
