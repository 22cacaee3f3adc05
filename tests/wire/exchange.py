"""One exchange with a server in this process, over HTTP or gRPC, as a text that reads from the request to the end."""

import asyncio
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import httpx
from google.protobuf import descriptor_pool, message_factory, text_format
from google.protobuf.message import Message

from attend.model.text.chat import ChatTemplate
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Limits
from attend.service.chat.forms import form_of
from attend.service.http_api.app import build_app
from attend.service.http_api.route_deps import RouteDeps
from tests.fakes import CallContext, FakeEngine, Server, build_server, grpc_channel

SECRET = "att_secret"
"""The one key of a server with keys."""
WIDTH = 120
MASKS = {
    r'("(?:created|created_at|completed_at)": ?)\d+': r"\1<now>",
    r"\b[0-9a-f]{32}\b": "<request id>",
    r'^(version: )".*"$': r'\1"<version>"',
}
"""What varies by its nature, and what stands in its place."""
DRAWN_SEED = {r'("?seed"?: ?)\d+': r"\1<drawn>", r"^(id: )[0-9a-f]+": r"\1<drawn>"}
"""Varies too, where the caller chose none; the id of an event holds it."""

MakeEngine = Callable[[], FakeEngine]


@dataclass(frozen=True)
class Http:
    """An HTTP call and the server that it meets."""

    name: str
    body: Any = None
    """A document to be sent as JSON, text to be sent as it stands, or nothing."""
    path: str = "/v1/completions"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    engine: MakeEngine = FakeEngine
    limits: Limits | None = None
    """Of the server's one key; a server without keys has none."""
    times: int = 1
    """How often the call is made; the last answer is shown."""
    template: str | None = None

    def transcript(self) -> str:
        """The request and its answer."""
        headers = ({} if self.body is None else {"Content-Type": "application/json"}) | self.headers
        sent = self.body if isinstance(self.body, str | None) else json.dumps(self.body, ensure_ascii=False)
        answer = asyncio.run(self._answer(sent, headers))
        told = {name: value for name, value in answer.headers.items() if name != "content-length"}
        shown = sent if self.body is sent else _readable(self.body)
        request = f"{self.method} {self.path}\n{_lines(headers)}\n{shown or ''}"
        response = f"{answer.status_code}\n{_lines(told)}\n{_content(answer)}"
        return _joined(request, response)

    async def _answer(self, sent: str | None, headers: dict[str, str]) -> httpx.Response:
        with tempfile.TemporaryDirectory() as folder:
            server = serve(self.engine(), self.limits, self.template, Path(folder))
            async with server.http() as client:
                for _ in range(self.times):
                    answer = await client.request(self.method, self.path, content=sent, headers=headers)
        return answer


@dataclass(frozen=True)
class Rpc:
    """A gRPC call and the server that it meets."""

    name: str
    message: Message | bytes
    method: str = "attend.v1.GenerationService.Generate"
    metadata: tuple[tuple[str, str], ...] = ()
    engine: MakeEngine = FakeEngine
    limits: Limits | None = None
    times: int = 1
    template: str | None = None

    def transcript(self) -> str:
        """The request, the messages that came, and the status."""
        answers, status = asyncio.run(self._answers())
        sent = _readable_message(self.message) if isinstance(self.message, Message) else f"bytes {self.message.hex()}\n"
        request = f"{self.method}\n{_lines(dict(self.metadata))}\n{sent}"
        response = "".join(f"message {i}\n{_readable_message(answer)}\n" for i, answer in enumerate(answers, start=1))
        return _joined(request, response + status)

    async def _answers(self) -> tuple[list[Message], str]:
        found = descriptor_pool.Default().FindMethodByName(self.method)
        service, _, name = self.method.rpartition(".")
        sent = self.message.SerializeToString() if isinstance(self.message, Message) else self.message
        read = message_factory.GetMessageClass(found.output_type).FromString
        metadata = mock.patch.object(CallContext, "invocation_metadata", create=True, return_value=self.metadata)
        with tempfile.TemporaryDirectory() as folder, metadata:
            server = serve(self.engine(), self.limits, self.template, Path(folder))
            async with grpc_channel(server) as channel:
                make = channel.unary_stream if found.server_streaming else channel.unary_unary
                begin = make(f"/{service}/{name}", response_deserializer=read)
                for _ in range(self.times):
                    answers, status = await _ended(begin(sent, metadata=self.metadata), streams=found.server_streaming)
        return answers, status


async def _ended(call: Any, *, streams: bool) -> tuple[list[Message], str]:
    """All messages of a call, and its status with what came beside it."""
    answers: list[Message] = []
    try:
        if streams:
            async for answer in call:
                answers.append(answer)
        else:
            answers.append(await call)
    except grpc.aio.AioRpcError:
        pass  # the status says so
    trailers = {str(name): str(value) for name, value in await call.trailing_metadata() or ()}
    details = await call.details()
    return answers, f"{(await call.code()).name}{': ' if details else ''}{details}\n{_lines(trailers)}"


def serve(engine: FakeEngine, limits: Limits | None, template: str | None, folder: Path) -> Server:
    """A server with a chat template and one API key, where they are given; a minute of its keys never passes."""
    server = build_server(engine)
    keys = None
    if limits is not None:
        write_keys(folder / "keys.json", {"client": Entry(digest_of(SECRET.encode()), limits)})
        keys = KeyRing(folder / "keys.json", lambda: 0.0)

    async def scrape() -> str:
        return server.metrics.text()

    methods, form = server.methods, form_of(template or "")
    methods.template, methods.form, methods.keys = None if template is None else ChatTemplate(template), form, keys
    facts = (server.service, server.metrics, "1.2.3", scrape, lambda: engine.draining)
    server.build = partial(build_app, RouteDeps(*facts, methods.template, form, keys, explaining=server.explaining))
    return server


def _joined(request: str, response: str) -> str:
    masks = MASKS if "seed" in request else MASKS | DRAWN_SEED
    for pattern, shown in masks.items():
        response = re.sub(pattern, shown, response, flags=re.MULTILINE)
    return f"{request.rstrip()}\n\n{'-' * 40}\n{response}"


def _lines(headers: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in sorted(headers.items()))


def _content(answer: httpx.Response) -> str:
    """JSON so that it can be read; anything else, and a stream above all, byte for byte."""
    if answer.content and answer.headers.get("content-type") == "application/json":
        return _readable(json.loads(answer.content)) + "\n"
    return answer.content.decode("utf-8")


def _readable(value: Any, indent: str = "") -> str:
    """JSON with one line for what fits on one or holds nothing deeper, in the order in which it was sent."""
    line = json.dumps(value, ensure_ascii=False)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(indent + line) <= WIDTH or not any(isinstance(item, dict | list) for item in inner):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_readable(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + item for item in items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _readable(item, deeper) for item in value) + f"\n{indent}]"


def _readable_message(message: Message) -> str:
    text: str = text_format.MessageToString(message, as_utf8=True, use_short_repeated_primitives=True)
    return text
