"""One bad input as a row of the table in `bad_inputs.py`, and short ways to write one."""

import json
from dataclasses import dataclass, field
from typing import Any

from attend.v1 import generation_pb2 as pb
from tests.service.bad_calls import CHAT, COMPLETIONS, EMBEDDINGS, JSON

INVALID, UNSUPPORTED, CONTEXT = "invalid_value", "unsupported_value", "context_length_exceeded"
STATUSES = {CONTEXT: 400, INVALID: 400, UNSUPPORTED: 400, "request_too_large": 413, "unsupported_media_type": 415}
STATUSES |= {"model_not_found": 404, "not_found": 404, "method_not_allowed": 405, "invalid_api_key": 401}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bad input. `code` gives the HTTP status and the gRPC code too."""

    name: str
    """Class and case: `types: a float for n`."""
    code: str
    param: str | None
    """The field that `error.param` names over HTTP."""
    word: str
    """Stands in the message, on both transports."""
    body: bytes | None = None
    """Sent by HTTP where not None."""
    method: str = "POST"
    path: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    rpc: str = "Generate"
    message: bytes | None = None
    """Sent by gRPC where not None."""
    metadata: tuple[tuple[str, str], ...] = ()
    keyed: bool = False
    """Needs a server with API keys."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Where it is sent."""
        given = (("http", self.body), ("grpc", self.message))
        return tuple(name for name, sent in given if sent is not None)


def http(name: str, body: Any, param: str | None, word: str, code: str = INVALID, **more: Any) -> Row:
    """A body, as bytes or as a JSON document."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Row(name=name, code=code, param=param, word=word, body=sent, **more)


def completion(name: str, fields: dict[str, Any], param: str, word: str, code: str = INVALID) -> Row:
    """Fields beside a good prompt."""
    return http(name, {"prompt": "a"} | fields, param, word, code)


def chat(name: str, fields: dict[str, Any], param: str, word: str, code: str = INVALID) -> Row:
    """Fields beside good messages, or in their place."""
    return http(name, {"messages": [{"role": "user", "content": "a"}]} | fields, param, word, code, path=CHAT)


def says(name: str, message: Any, param: str, word: str, code: str = INVALID) -> Row:
    """A bad message after a good one."""
    return chat(name, {"messages": [{"role": "user", "content": "a"}, message]}, param, word, code)


def both(name: str, fields: dict[str, Any], request: dict[str, Any], param: str, word: str, code: str = INVALID) -> Row:
    """The same mistake on both transports."""
    message = pb.GenerateRequest(**({} if "token_ids" in request else {"text": "a"}) | request)
    sent = json.dumps({"prompt": "a"} | fields).encode()
    return Row(name=name, code=code, param=param, word=word, body=sent, message=message.SerializeToString())


def embeds(name: str, fields: dict[str, Any], request: dict[str, Any], param: str, word: str, code: str = INVALID) -> Row:
    """The same mistake in a call for embeddings, on both transports."""
    message = pb.EmbedRequest(**{"inputs": [{"text": "a"}]} | request).SerializeToString()
    sent = json.dumps({"input": "a"} | fields).encode()
    return Row(name=name, code=code, param=param, word=word, body=sent, message=message, path=EMBEDDINGS, rpc="Embed")


def grpc(name: str, message: bytes, word: str, code: str = INVALID, **more: Any) -> Row:
    """The bytes of a message."""
    return Row(name=name, code=code, param=None, word=word, message=message, **more)


def headed(name: str, headers: dict[str, str], word: str) -> Row:
    """A good body under headers that do not let it in."""
    return http(name, {"prompt": "a"}, None, word, "unsupported_media_type", headers=headers)


def gone(name: str, method: str, path: str, word: str, code: str) -> Row:
    """A route that is not there, or not with this method."""
    return http(name, b"", None, word, code, method=method, path=path)


SECRET = "att_open-sesame"
A = {"prompt": "a"}
GOOD = pb.GenerateRequest(text="a").SerializeToString()


def keyless(name: str, value: str | None, word: str) -> Row:
    """A good call whose Authorization is not good, on both transports."""
    headers = JSON if value is None else JSON | {"authorization": value}
    metadata = () if value is None else (("authorization", value),)
    more: dict[str, Any] = {"headers": headers, "metadata": metadata, "message": GOOD, "keyed": True}
    return http(f"keys: {name}", A, None, word, "invalid_api_key", **more)
