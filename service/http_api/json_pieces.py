"""JSON written in pieces, so that a large answer neither blocks the event loop nor is held whole."""

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import orjson
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from attend.service.generation.cooperative import in_turns

PIECE = 32 << 10
"""Bytes after which a piece is handed over: about a millisecond of work."""
ITEMS = 16
"""Items of a list that are made and written together."""


def json_pieces(document: Any) -> Iterator[bytes]:
    """The JSON of `document` in pieces of PIECE bytes and a little more; together they are what orjson writes.

    A long list stands in `document` as an iterator: its items, which hold no iterators, are made as they are written. Arrays
    of numpy are lists of numbers, with as many digits as float32 needs where they are of that. A memoryview is its bytes in
    base64.
    """
    held = bytearray()
    for part in _parts(document):
        held += part
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def json_bytes(value: Any) -> bytes:
    """The JSON of a value as orjson writes it, also where integers of callers or of the model have more than 64 bits."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return orjson.dumps(_spell_integers(value), option=orjson.OPT_SERIALIZE_NUMPY)


def _spell_integers(value: Any) -> Any:
    """The same value with its long integers written out."""
    if isinstance(value, dict):
        return {name: _spell_integers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_integers(item) for item in value]
    is_long = isinstance(value, int) and not -(1 << 63) <= value < 1 << 64
    return orjson.Fragment(str(value)) if is_long else value


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield b"{"
        for place, (name, item) in enumerate(value.items()):
            yield (b"," if place else b"") + json_bytes(name) + b":"
            yield from _parts(item)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield b"["
        for place, item in enumerate(value):
            yield b"," if place else b""
            yield from _parts(item)
        yield b"]"
    elif isinstance(value, Iterator):
        yield b"["
        separator = b""
        while items := [*islice(value, ITEMS)]:
            yield separator + json_bytes(items)[1:-1]
            separator = b","
        yield b"]"
    elif isinstance(value, memoryview):
        yield b'"%s"' % base64.b64encode(value)
    else:
        yield json_bytes(value)


class PieceResponse(StreamingResponse):
    """An answer in JSON, piece by piece, without a Content-Length. `resources` is closed once the caller has it or has left."""

    def __init__(self, parts: Iterator[bytes], resources: ExitStack) -> None:
        super().__init__(in_turns(parts), media_type="application/json")
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer piece by piece, then release what it holds."""
        with self._resources:
            await super().__call__(scope, receive, send)


def json_answer(content: object) -> Response:
    """A short answer in JSON."""
    return Response(json_bytes(content), media_type="application/json")


def json_response(document: Any, resources: ExitStack | None = None) -> Response:
    """An answer in JSON: at once where it is one piece, else in pieces, for which it takes over what `resources` holds."""
    parts = json_pieces(document)
    first = [*islice(parts, 2)]
    if len(first) < 2:
        return Response(first[0], media_type="application/json")
    return PieceResponse(chain(first, parts), ExitStack() if resources is None else resources.pop_all())
