"""Calls that may be anything, and the law of their answers: an answer, or a refusal in the one shape, never a bug's."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from attend.model.text.chat import ChatTemplate
from attend.service.access.keys import KeyRing
from attend.service.batch.service import BatchService
from attend.service.chat.forms import form_of
from attend.service.errors import INTERNAL, TABLE
from attend.service.http_api.app import build_app
from attend.service.http_api.problems import ANTHROPIC
from attend.service.http_api.route_deps import RouteDeps
from attend.v1 import generation_pb2 as pb
from tests.fakes import CallContext, FakeEngine, Server, build_server
from tests.service.sse import events_of

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
EMBEDDINGS = "/v1/embeddings"
RERANK, SCORE = "/v1/rerank", "/v1/score"
JSON = {"content-type": "application/json"}
STATUSES = {200, 400, 404, 413, 415, 429}
CODES = {row.code for row in TABLE.values()} | {"not_found", "method_not_allowed"}
KINDS = {row.kind for row in TABLE.values()} - {INTERNAL.kind} | {*ANTHROPIC.values()} - {"api_error"}
GRPC_CODES = {None, *(row.grpc for row in TABLE.values() if row.status in STATUSES)}
INSIDES = re.compile(r"Traceback|[a-z]Error\b|[a-z]Exception\b|NoneType|<class|object at 0x|File \"|site-packages|pydantic")
"""What only Python says. An answer may repeat its input, and Hypothesis draws words from this very file."""
LONGEST_MESSAGE = 1024
CPU_SECONDS = 2.0
"""Of the event loop's thread for one call; the slowest good ones take a tenth of it."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back over HTTP."""

    status: int
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object. Fails where there is none, or where it is in neither OpenAI's shape nor Anthropic's."""
        document = json.loads(self.body)
        assert set(document) == {"error"} or (set(document) == {"type", "error", "request_id"} and document["type"] == "error")
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error


def whole_server(
    engine: FakeEngine | None = None,
    keys: KeyRing | None = None,
    template: str = TEMPLATE,
    batch_service: BatchService | None = None,
) -> Server:
    """A replica without Ray that has a chat template, and API keys where a ring is given."""
    server = build_server(engine)

    async def scrape() -> str:
        return server.metrics.text()

    facts = (server.service, server.metrics, "1.2.3", scrape, lambda: False)
    chat, form = ChatTemplate(template), form_of("", "hermes", "think")
    deps = RouteDeps(*facts, chat, form, keys, explaining=server.explaining, batch_service=batch_service)
    server.app, server.methods.keys = build_app(deps), keys
    server.methods.template, server.methods.form = chat, form
    return server


async def asgi(server: Server, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
    """One POST to the application, without a client between that could refuse to send it."""
    sent: list[Any] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return pieces.pop() if pieces else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    names = JSON | (headers or {})
    scope = {
        **{"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST"},
        **{"scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""},
        **{"headers": [(name.encode(), value.encode("latin-1")) for name, value in names.items()]},
        **{"client": ("127.0.0.1", 1), "server": ("attend", 80)},
    }
    try:
        await server.app(scope, receive, send)
    except Exception:  # raised again by the outermost layer, after it has answered with a 500, as it does under uvicorn
        assert sent
    return Answer(sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]))


class MetadataContext(CallContext):
    """A context that knows what was sent beside the message, as that of Ray does."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata


async def grpc_bytes(server: Server, method: str, data: bytes, metadata: Sequence[tuple[str, str]] = ()) -> CallContext:
    """One RPC from its bytes; what status it set."""
    context = MetadataContext(metadata)
    call = getattr(server.methods, method)(data, context)
    if method.endswith("Stream"):
        async for _ in call:
            pass
    else:
        await call
    return context


def check_sentence(message: Any, sent: bytes = b"") -> None:
    """A refusal's words: some, not many, and none of Python's but those that were sent."""
    assert isinstance(message, str)
    assert 0 < len(message) <= LONGEST_MESSAGE, len(message)
    assert not [word for word in INSIDES.findall(message) if word.encode() not in sent], message


def check_answer(answer: Answer, sent: bytes = b"", *, deadline: bool = False) -> None:
    """The law over HTTP, of the answer to a body. A call with a deadline may also be too late."""
    assert answer.status in (STATUSES | {504} if deadline else STATUSES), (answer.status, answer.body[:300])
    if answer.status == 200:
        check_stream(answer.body)
        return
    error = answer.error
    check_sentence(error["message"], sent)
    assert error["type"] in KINDS
    assert error["code"] in CODES
    assert error["param"] is None or (isinstance(error["param"], str) and len(error["param"]) <= 256)


def check_stream(body: bytes) -> None:
    """An answer is one JSON object, or events that end in [DONE] and hold no error of ours."""
    if body.startswith(b"{"):
        assert isinstance(json.loads(body), dict)
        return
    assert not any("error" in event for event in events_of(body.decode()))


def check_status(context: CallContext, sent: bytes = b"", *, deadline: bool = False) -> None:
    """The law over gRPC, of the answer to a message."""
    late = {grpc.StatusCode.DEADLINE_EXCEEDED} if deadline else set()
    assert context.code in GRPC_CODES | late, (context.code, context.details)
    if context.code is not None:
        check_sentence(context.details, sent)


class Prey:
    """A server that is sent anything, on one event loop, and must be as well after each call as before."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.server = whole_server(self.engine)
        self.runner = asyncio.Runner()
        self.calls = 0
        self.refused = 0

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        """One POST, judged."""
        answer: Answer = self._timed(asgi(self.server, path, body, headers))
        check_answer(answer, body, deadline=b"deadline" in body)
        self.refused += answer.status != 200
        return answer

    def call(self, method: str, data: bytes) -> CallContext:
        """One RPC, judged."""
        context: CallContext = self._timed(grpc_bytes(self.server, method, data))
        check_status(context, data, deadline=True)  # a flipped bit may be a deadline
        self.refused += context.code is not None
        return context

    def check_well(self) -> None:
        """Both transports answer a good call as ever, and no call was counted as a bug."""
        good = self.post(COMPLETIONS, b'{"prompt": "a", "max_tokens": 3}')
        assert json.loads(good.body)["choices"][0]["text"] == "bcd"
        request = pb.GenerateRequest(text="a", max_tokens=3)
        assert self.call("Generate", request.SerializeToString()).code is None
        assert not [key for key in self.server.outcomes() if key[2] == "error"]

    def _timed(self, call: Any) -> Any:
        self.calls += 1
        self.engine.requests.clear()
        started = time.thread_time()
        result = self.runner.run(call)
        assert time.thread_time() - started < CPU_SECONDS
        assert not self.engine.open, "the engine still holds a request"
        return result
