"""What a report says of its own making."""

import http.server
import json
import sys
import threading
from contextlib import contextmanager

import pytest

from loadtest.provenance import identity, provenance


@contextmanager
def saying(answers):
    """The URL of a server that answers each path with a document, or else 404, and the headers that it was sent."""
    heard = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            heard.append(self.headers)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def do_POST(self):
            self.do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", heard
        server.shutdown()


MODELS = {"/v1/models": {"data": [{"id": "m"}]}}
OURS = {"/version": {"version": "1.2", "system_fingerprint": "fp_1"}}
OF_ANSWERS = {"/v1/completions": {"system_fingerprint": "b7-abc"}}


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (MODELS | OURS | OF_ANSWERS, ("m", "1.2", "fp_1")),
        (MODELS | OF_ANSWERS, ("m", None, "b7-abc")),
        (MODELS | {"/version": {"version": "0.3"}}, ("m", "0.3", None)),
        (MODELS | {"/version": ["no document"]}, ("m", None, None)),
        ({}, (None, None, None)),
    ],
    ids=["ours", "of answers", "no fingerprint", "another shape", "nothing"],
)
def test_a_server_is_known_by_what_it_says_of_itself(answers, found):
    with saying(answers) as (url, _):
        said = identity(url)
    assert (said["model"], said["version"], said["fingerprint"]) == found and said["url"] == url


def test_who_is_not_there_says_nothing():
    assert identity("http://127.0.0.1:9")["model"] is None


def test_a_service_that_asks_for_a_key_gets_it(monkeypatch):
    monkeypatch.setenv("ATTEND_API_KEY", "its-key")
    with saying(MODELS | OURS) as (url, heard):
        identity(url)
    assert {headers["authorization"] for headers in heard} == {"Bearer its-key"}


def test_a_report_says_who_when_how_and_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/attend bench serve", "--at-once", "1"])
    found = provenance(7, {"one": {"model": "m"}})
    assert (found["seed"], found["servers"]) == (7, {"one": {"model": "m"}})
    assert found["command"] == ["attend bench serve", "--at-once", "1"]
    assert found["when"][:2] == "20" and found["attend"]
    assert found["machine"]["processor"] and found["machine"]["cores"] >= 1 and found["machine"]["memory"] > 1 << 20
    assert json.loads(json.dumps(found)) == found
