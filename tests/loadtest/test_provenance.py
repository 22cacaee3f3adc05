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
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", heard
        server.shutdown()


MODELS = {"/v1/models": {"data": [{"id": "m"}]}}
OURS = {"/version": {"version": "1.2", "system_fingerprint": "fp_1"}}


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (MODELS | OURS, ("m", "1.2", "fp_1")),
        (MODELS | {"/version": ["no document"]}, ("m", None, None)),
        ({}, (None, None, None)),
    ],
    ids=["ours", "another shape", "nothing"],
)
def test_a_server_is_known_by_what_it_says_of_itself_and_gets_its_key(answers, found, monkeypatch):
    monkeypatch.setenv("ATTEND_API_KEY", "its-key")
    with saying(answers) as (url, heard):
        said = identity(url)
    assert (said["model"], said["version"], said["fingerprint"]) == found and said["url"] == url
    assert {headers["authorization"] for headers in heard} == {"Bearer its-key"}
    assert identity("http://127.0.0.1:9")["model"] is None


def test_a_report_says_who_when_how_and_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/attend bench serve", "--at-once", "1"])
    found = provenance(7, {"one": {"model": "m"}})
    assert (found["seed"], found["servers"]) == (7, {"one": {"model": "m"}})
    assert found["command"] == ["attend bench serve", "--at-once", "1"]
    assert found["when"][:2] == "20" and found["attend"]
    assert found["machine"]["processor"] and found["machine"]["cores"] >= 1 and found["machine"]["memory"] > 1 << 20
    assert json.loads(json.dumps(found)) == found
