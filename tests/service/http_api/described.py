"""A fake server that describes itself, and what it takes to hold its answers against its /openapi.json."""

import json
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import httpx
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from attend.service.contract.routes import BATCH_CREATE, OPEN, ROUTES
from attend.service.http_api.json_pieces import json_pieces
from attend.service.http_api.openapi import OPERATIONS
from attend.service.http_api.route_deps import RouteDeps
from tests.fakes import FakeEngine, Server, build_server
from tests.service.sse import events_of, named_events_of

TEMPLATE = ChatTemplate(
    "{% for t in tools or [] %}{{ t.function.name }} {{ (t.function.parameters or {}).properties or [] }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
OTHERS = [*dict.fromkeys(route.path for route in ROUTES if not route.is_counted and route not in OPEN)]
"""Routes that ask for a key and generate nothing."""
LEAST = {path: each.example for (_, path), each in OPERATIONS.items() if each.example and path != BATCH_CREATE.path}
"""A small body of each route that takes one, but for batches, which need a folder."""


def chatting_server(engine: FakeEngine | None = None, **more: Any) -> Server:
    """A replica without Ray whose checkpoint has a chat template."""
    with patch("tests.fakes.RouteDeps", partial(RouteDeps, **more)):
        return build_server(engine, template=TEMPLATE, form=form_of("", "hermes", "think"))


def fastapi_of(server: Server) -> FastAPI:
    """The FastAPI application inside the server's."""
    app: Any = server.app
    while not isinstance(app, FastAPI):
        app = app.app
    return app


def as_read(document: dict[str, Any]) -> Any:
    """An object of a writer as its reader sees it: its iterators are lists."""
    return json.loads(b"".join(json_pieces(document)))


@cache
def document() -> dict[str, Any]:
    return fastapi_of(chatting_server()).openapi()


def operation(path: str) -> dict[str, Any]:
    return document()["paths"][path]["post" if path in LEAST else "get"]


ask = Server.ask


def faults(schema: dict[str, Any], value: Any) -> list[str]:
    """What `schema`, a part of the document, has against `value`."""
    whole = schema | {"components": document()["components"]}
    return [error.message for error in Draft202012Validator(whole).iter_errors(value)]


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream that ends as it should."""
    return named_events_of(response.text) if response.text.startswith("event: ") else events_of(response.text)


def event_schema(media: dict[str, Any]) -> dict[str, Any]:
    """The schema of the JSON in the events of a described stream."""
    *done, event = media["schema"]["properties"]["data"]["anyOf"]
    assert done in ([{"const": "[DONE]"}], [])
    return event["contentSchema"]


def assert_described(response: httpx.Response, described: dict[str, Any]) -> None:
    """The response is one of those that the operation `described` has, whole or event by event."""
    answer = described["responses"][str(response.status_code)]
    media = answer["content"][response.headers["content-type"].partition(";")[0]]
    if response.headers["content-type"].startswith("text/event-stream"):
        assert [faults(event_schema(media), event) for event in events(response)] == [[] for _ in events(response)]
    elif response.headers["content-type"].startswith("application/json"):
        assert not faults(media["schema"], response.json())
    else:
        assert not faults(media["schema"], response.text)
