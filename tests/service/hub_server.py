"""A server on loopback that plays the Hugging Face hub for one repository: its listing, and its files.

What it is told to do wrong is in its attributes. Sources: huggingface_hub's own requests, and the headers it asks for.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 4096
"""Files of so many bytes are in large-file storage: the hub names their SHA-256. Of others it names git's hash."""


class HubServer(ThreadingHTTPServer):
    """One repository, `org/tiny`, whose branch `main` is the commit COMMIT."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.token: str | None = None
        """What callers must send, or files are refused as those of a gated repository."""
        self.broken: int | None = None
        """Status of every answer; -1 answers nothing."""
        self.lost: str | None = None
        """A file that it lists and cannot give."""
        self.spoiled = False
        """True if the weights have one byte wrong."""
        self.gate: threading.Event | None = None
        """What the weights wait for."""
        self.asked: list[str] = []
        """Method and path of every request; SENT and a name where a file is sent."""
        self.downloads: Counter[str] = Counter()
        """GETs of each file."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()


def etag(content: bytes) -> str:
    """The hash by which the hub names a file."""
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.broken == -1:
            self.close_connection = True
            return None
        if self.server.broken is not None:
            return self.refuse(self.server.broken, "")
        known = re.fullmatch(r"/api/models/org/tiny/(revision|tree)/(.+)|/org/tiny/(resolve)/([^/]+)/(.+)", path)
        if known is None:
            return self.refuse(404, "RepoNotFound")
        kind, revision, name = known[1] or known[3], known[2] or known[4], known[5]
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if kind == "resolve":
            return self.file(name, body)
        self.send_json({"id": "org/tiny", "sha": COMMIT, "siblings": []} if kind == "revision" else self.tree())

    def tree(self) -> list[dict[str, object]]:
        entries = []
        for path, content in self.server.files.items():
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
            if len(content) >= LARGE:
                entry["lfs"] = {"oid": etag(content), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        return entries

    def file(self, name: str, body: bool) -> None:
        if self.server.token is not None and self.headers.get("authorization") != f"Bearer {self.server.token}":
            return self.refuse(403 if "authorization" in self.headers else 401, "GatedRepo")
        if name not in self.server.files:
            return self.refuse(404, "EntryNotFound")
        if name == self.server.lost:
            return self.refuse(500, "")
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.server.downloads[name] += 1
            self.send(name, content)

    def send(self, name: str, content: bytes) -> None:
        server = self.server
        if name.endswith((".safetensors", ".gguf")):
            if server.gate is not None:
                server.gate.wait(240)
            if server.spoiled:
                content = content[:-1] + bytes([content[-1] ^ 1])
        server.asked.append(f"SENT {name}")
        self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
