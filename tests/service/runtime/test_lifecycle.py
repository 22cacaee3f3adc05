"""The lines of a start: where the server listens, who may call it, and a call that works as printed."""

import json
import shlex

import pytest

from attend.service.runtime import lifecycle
from attend.service.runtime.lifecycle import ready_line
from attend.service.settings import Settings

FACTS = {"family": "llama", "parameters": 1e6, "device": "cpu", "dtype": "float32", "weights": "float32"}
FACTS |= {"backend": "torch", "kv_tokens": 32, "kv_bytes": 1e8, "chats": True, "device_name": "AMD EPYC, AVX-512-BF16"}


def lines(**settings):
    chats = settings.pop("chats", False)
    ready, example, page = ready_line(Settings(**settings), FACTS | {"chats": chats}).split("\n")
    assert page.startswith("Open:  http") and page.endswith("/ in a browser")
    assert ready.startswith("Ready: ") and example.startswith("Try:   ")
    return ready, example.removeprefix("Try:   ")


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "localhost"),
        ("0.0.0.0", "localhost"),
        ("::", "localhost"),
        ("::1", "[::1]"),
        ("fe80::2", "[fe80::2]"),
        ("10.0.0.1", "10.0.0.1"),
        ("a.example", "a.example"),
    ],
)
def test_the_lines_have_urls_also_of_ipv6(host, shown):
    ready, example = lines(host=host, single=True)
    assert ready.startswith(f"Ready: http://{shown}:8000  grpc {shown}:9000  ")
    assert example.endswith(f" http://{shown}:8000/v1/completions")


@pytest.mark.parametrize(
    ("settings", "reach"),
    [
        ({"single": True}, "on this machine"),
        ({"single": True, "host": "::1"}, "on this machine"),
        ({"single": True, "host": "localhost"}, "on this machine"),
        ({"single": True, "host": "0.0.0.0"}, "who reaches 0.0.0.0"),
        ({"single": True, "host": "10.0.0.1"}, "who reaches 10.0.0.1"),
        ({}, "who reaches this machine"),
        ({"host": "10.0.0.1"}, "who reaches this machine"),
    ],
)
def test_a_server_without_keys_says_to_whom_it_is_open(settings, reach):
    """Ray's own ports listen on every address."""
    assert lines(**settings)[0].endswith(f"  no API keys: open to everybody {reach}")
    assert "open to" not in lines(**settings, api_keys_file="keys")[0]


def test_a_page_that_is_not_served_is_not_named():
    assert "Open" not in ready_line(Settings(expose_docs=False), FACTS)


def test_the_example_fits_what_is_served():
    assert "/v1/completions" in lines()[1], "the shipped model was not taught to chat"
    words = shlex.split(
        lines(model="x", chats=True, tls_cert="/a b/tls.crt", tls_key="k", api_keys_file="keys", host="a.example")[1]
    )
    assert words[:3] == ["curl", "-N", "--cacert"] and words[3] == "/a b/tls.crt"
    assert words[4:6] == ["-H", "Authorization: Bearer $ATTEND_API_KEY"]
    assert json.loads(words[7])["messages"][0]["role"] == "user"
    assert words[8] == "https://a.example:8000/v1/chat/completions"


def test_the_ready_line_says_what_computes_and_how_long_the_start_was(monkeypatch):
    monkeypatch.setattr(lifecycle, "process_age", lambda: 3.14159)
    ready = ready_line(Settings(single=True), FACTS).split("\n")[0]
    assert "  cpu (AMD EPYC, AVX-512-BF16) float32 torch  32 KV tokens in 0.1 GB  started in 3.1 s" in ready
