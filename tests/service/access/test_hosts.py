"""Which names a server answers to: those of its own machine alone, where nothing else keeps a stranger's web page out."""

import asyncio

import pytest

from attend.model.errors import SettingError
from attend.service.access.hosts import DOTLESS, allowed_names, answers, host_of, is_loopback
from attend.service.settings import Settings, read_settings
from tests.fakes import build_server

LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2", "LOCALHOST"])
def test_without_keys_a_server_on_a_loopback_address_has_the_names_of_its_machine(host):
    assert allowed_names("", host, has_api_keys=False) == LOOPBACK | {DOTLESS, host.lower()}
    assert allowed_names("", host, has_api_keys=True) == set()
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "server.example"])
def test_one_that_others_reach_answers_to_any_name(host):
    assert allowed_names("", host, has_api_keys=False) == set()


def test_the_setting_takes_the_place_of_the_default():
    assert allowed_names("a.example, [::1],B.example.", "127.0.0.1", has_api_keys=False) == {"a.example", "::1", "b.example"}
    assert allowed_names("a.example", "0.0.0.0", has_api_keys=True) == {"a.example"}
    assert allowed_names("*", "127.0.0.1", has_api_keys=False) == set()


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:8000", "localhost"),
        ("localhost.:8000", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[0:0:0:0:0:0:0:1]:8000", "::1"),
        ("[::1]evil.example", ""),
        ("localhost:80@evil.example", ""),
        ("localhost evil.example", "localhost evil.example"),
        ("", ""),
    ],
)
def test_a_port_is_no_part_of_a_host(value, host):
    assert host_of(value) == host


def statuses(*hosts: str | list[str], path: str = "/v1/models", **more) -> list[int]:
    server = build_server(hosts=allowed_names("", "127.0.0.1", has_api_keys=False), **more)

    async def run() -> list[int]:
        async with server.http() as http:
            return [(await http.get(path, headers={"host": host})).status_code for host in hosts]

    return asyncio.run(run())


OWN = ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LocalHost:1"]
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.2", ""]


@pytest.mark.parametrize("path", ["/v1/models", "/", "/docs", "/openapi.json", "/version", "/metrics", "/tokenizer_info"])
def test_a_rebound_name_gets_nothing_and_the_names_of_the_machine_all(path):
    assert statuses(*OWN, path=path) == [200] * len(OWN)
    assert statuses(*OTHERS, path=path) == [421] * len(OTHERS)


def test_by_default_names_without_a_dot_are_answered_since_no_page_can_own_one():
    names = allowed_names("", "127.0.0.1", has_api_keys=False)
    assert all(answers(names, host_of(host)) for host in (*OWN, "attend", "x", "my-machine:8000", "localhost."))
    assert not any(answers(names, host_of(host)) for host in (*OTHERS, "a b", "[::2]", "evil.example.", "x:y"))
    assert not answers(allowed_names("a.example", "127.0.0.1", has_api_keys=False), "x")


@pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz"])
def test_probes_are_answered_by_any_name(path):
    assert statuses(*OWN, *OTHERS, path=path) == [200] * len([*OWN, *OTHERS])


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/nowhere"]
)
def test_the_refusal_names_the_setting_in_the_shape_of_the_routes_api_and_has_an_id(path):
    server = build_server(hosts=LOOPBACK)
    answer = server.post({"prompt": "a"}, path, headers={"host": "evil.example"})
    assert answer.status_code == 421
    document = answer.json()
    problem = document["error"]
    assert problem["code"] == "host_not_allowed"
    for word in ("'evil.example'", "127.0.0.1, ::1, localhost", "allowed_hosts"):
        assert word in problem["message"]
    assert (document.get("type"), problem["type"]) == (
        ("error" if "messages" in path else None),
        "invalid_request_error",
    )
    assert answer.headers["x-request-id"]
    assert not server.engine.requests


def test_a_host_of_many_characters_is_cut_and_cannot_write_a_line():
    answer = build_server(hosts=LOOPBACK).post({}, headers={"host": "é".encode("latin-1") * 300})
    assert answer.status_code == 421
    assert len(answer.text) < 900 and answer.text.isascii()


@pytest.mark.parametrize("text", ["a:80", "*.example", "a, *", "a b", "http://a", "-", "a/b"])
def test_a_name_that_is_none_stops_the_start(text):
    with pytest.raises(SettingError, match=r"allowed_hosts = .*without a port"):
        read_settings({"allowed_hosts": text}, {})
    assert Settings(allowed_hosts="a.example,10.0.0.1,[fd00::1],*"[:-2]).allowed_hosts
