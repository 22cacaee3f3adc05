"""The lines of a start: where the server listens, what it serves, and who may call it."""

import pytest

from attend.service.runtime import lifecycle
from attend.service.runtime.lifecycle import ready_line
from attend.service.settings import Settings

FACTS = {"family": "llama", "parameters": 1e6, "device": "cpu", "dtype": "float32", "weights": "float32"}
FACTS |= {"backend": "torch", "kv_tokens": 32, "kv_bytes": 1e8, "device_name": "AMD EPYC, AVX-512-BF16"}


def ready(**settings) -> str:
    line, page = ready_line(Settings(**settings), FACTS).split("\n")
    assert page.startswith("Open:  http") and page.endswith("/ in a browser")
    return line


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
    assert ready(host=host, single=True).startswith(f"Ready: http://{shown}:8000  grpc {shown}:9000  ")
    assert ready(host=host, tls_cert="a", tls_key="b").startswith(f"Ready: https://{shown}:8000 ")


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
    assert ready(**settings).endswith(f"  no API keys: open to everybody {reach}")
    assert "open to" not in ready(**settings, api_keys_file="keys")


def test_a_page_that_is_not_served_is_not_named():
    assert "Open" not in ready_line(Settings(expose_docs=False), FACTS)


def test_the_ready_line_says_what_computes_and_how_long_the_start_was(monkeypatch):
    monkeypatch.setattr(lifecycle, "process_age", lambda: 3.14159)
    assert "  cpu (AMD EPYC, AVX-512-BF16) float32 torch  32 KV tokens in 0.1 GB  started in 3.1 s" in ready(single=True)
