"""Calls of a running server for the commands: over HTTP and gRPC, with an API key."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import grpc

from attend.model.errors import SettingError

SECONDS = 60.0
"""How long one call may take."""
GRPC_PORT = 9000
PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 16
OPENAI_ERROR = {"message", "type", "param", "code"}


class CheckFailed(Exception):
    """A check failed. The sentence says what the server did."""


class CheckSkipped(Exception):
    """There is nothing to check. The sentence says why."""


class Unreachable(Exception):
    """No server answers at the URL."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, with its whole body."""

    status: int
    content_type: str
    body: bytes

    def check(self, status: int = 200) -> None:
        """Raise CheckFailed for any other status than `status`."""
        require(self.status == status, f"the status is {self.status}, expected {status}: {beginning_of(self.body)}")

    def json(self, status: int = 200) -> Any:
        """The body as JSON; the status as in `check`."""
        self.check(status)
        return json.loads(self.body)

    def error(self, status: int) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        error: dict[str, Any] = self.json(status)["error"]
        require(set(error) == OPENAI_ERROR, f"the error is not in OpenAI's shape: {beginning_of(self.body)}")
        return error


@dataclass(slots=True)
class Probe:
    """A server under check, and what earlier checks have learned of it."""

    url: str
    grpc_target: str | None
    """HOST:PORT; None leaves gRPC out."""
    key: str | None = None
    is_grpc_guessed: bool = False
    """True if nobody has said where gRPC is: the server may."""
    model: str = ""
    about: str = ""
    text: str | None = None
    """The greedy answer to PROMPT, once it is known."""
    usage: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    """Calls made that were answered, by (transport, route)."""
    tokens: int = 0
    """Generated tokens that were received."""
    counters: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The metrics before the first call."""

    def get(self, path: str, *, key: str | None = None) -> Reply:
        """GET, with the key of the probe unless another is given; an empty one sends none."""
        return self._send(urllib.request.Request(self.url + path), self.key if key is None else key)

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """POST of a JSON object, the model's name with it once it is known."""
        data = json.dumps(({"model": self.model} if self.model else {}) | body).encode()
        return self._send(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), self.key)

    @contextmanager
    def events(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[bytes]]:
        """The lines of a streamed answer to a POST, as they come, at most SECONDS apart. Raises CheckFailed for a refusal."""
        data = json.dumps(({"model": self.model} if self.model else {}) | body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            answer = urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise CheckFailed(f"the status is {error.status}, expected 200: {beginning_of(error.read())}") from error
        with answer:
            yield (line.rstrip(b"\r\n") for line in answer)

    def greedy(self, **more: Any) -> dict[str, Any]:
        """The body that asks for the greedy answer."""
        return {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0} | more

    def count(self, transport: str, route: str, tokens: int) -> None:
        """Remember a call that was answered with so many tokens."""
        self.calls[transport, route] = self.calls.get((transport, route), 0) + 1
        self.tokens += tokens

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A gRPC channel, encrypted where the URL is; SSL_CERT_FILE counts as for HTTP. Raises CheckSkipped without gRPC."""
        if self.grpc_target is None:
            raise CheckSkipped("gRPC is left out")
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, ssl.create_default_context().get_ca_certs(binary_form=True)))
        safe = grpc.ssl_channel_credentials(roots.encode() or None) if self.url.startswith("https:") else None
        with grpc.secure_channel(self.grpc_target, safe) if safe else grpc.insecure_channel(self.grpc_target) as channel:
            yield channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each RPC: the API key, where one was given."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def _send(self, request: urllib.request.Request, key: str | None) -> Reply:
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            answer = urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:  # any status from 400 on
            answer = error
        with answer:
            return Reply(answer.status, answer.headers.get("content-type", ""), answer.read())


def check_target(url: str, grpc_target: str | None, key: str | None) -> Probe:
    """The server to check. gRPC is at the URL's host, at the port that /version names, unless given; "none" leaves it out.

    Raises SettingError.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"URL {url[:128]!r} cannot be used: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise SettingError(f"URL must be as http://HOST:PORT; got {url[:128]!r}")
    if key and not (key.isascii() and key.isprintable()):
        raise SettingError("the API key must be printable ASCII characters")
    beside = grpc_target or f"{f'[{host}]' if ':' in host else host}:{GRPC_PORT}"
    path = parts.path.rstrip("/").removesuffix("/v1")  # clients of OpenAI's API have it in their base URL
    base = f"{parts.scheme}://{parts.netloc}{path}"
    return Probe(base, None if grpc_target == "none" else beside, key or None, is_grpc_guessed=not grpc_target)


def require(holds: bool, otherwise: str) -> None:
    """Raise CheckFailed with a sentence unless something holds."""
    if not holds:
        raise CheckFailed(otherwise)


def beginning_of(body: bytes) -> str:
    """The first characters of a body, to be shown in a message."""
    text = body[:400].decode(errors="replace")
    return repr(text if len(text) <= 120 else text[:120] + "...")
