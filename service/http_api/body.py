"""A request body as strict JSON: UTF-8, no duplicate keys, no NaN, bounded in size and depth."""

import asyncio
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from attend.model.errors import DeadlineExceeded, InvalidRequest
from attend.service.chat.messages import MAX_DEPTH
from attend.service.errors import ClientGone, SlowBody, TooLarge, WrongMediaType
from attend.service.generation.cooperative import LONG_BODIES, yield_to_loop
from attend.service.generation.thread_pools import LARGE, long_bodies, run_exclusive
from attend.service.generation.unread_bodies import MESSAGE_SECONDS, IncomingBody, UnreadBodies
from attend.service.records import MAX_INPUT_TOKENS, Arrival, bytes_for

T = TypeVar("T")

MAX_BYTES = 1 << 20
"""Of a body, where the model's context is not so long that it needs more: see `most_bytes`."""
INLINE_BYTES = 4 << 10
"""Longer bodies are read in a thread: reading these takes up to a millisecond."""
BODY_SECONDS = MESSAGE_SECONDS
"""Seconds in which a caller must send all of a body: nothing in front of the application limits it."""
MAX_PARTS = 1 << 16
"""Strings and brackets in a body. Each costs the interpreter a microsecond, half a million of them cost every stream a second.
Two thousand messages have a third of these; token ids are none of them."""
# The closing quote is optional: an unfinished string is then read once, not once more from each quote inside it.
_STRING = rb'"(?:[^"\\]++|\\.)*+"?'
_ANY_STRING = re.compile(_STRING, re.DOTALL)
_STRING_OR_BRACKET = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SURROGATE = re.compile("[\ud800-\udfff]")


def most_bytes(max_model_len: int) -> int:
    """Bytes of a body, for a model with this context."""
    return bytes_for(max_model_len, MAX_BYTES)


def most_bytes_of_texts(max_model_len: int) -> int:
    """Bytes of a body with many texts, which may be longer than the context together."""
    return most_bytes(max(max_model_len, MAX_INPUT_TOKENS))


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a call before its body is read; the routes' guard puts it into the request's state."""

    arrival: Arrival
    unread_bodies: UnreadBodies
    deadline: float | None = None
    """When a call ends that asks for no earlier end."""


async def read_json(request: Request, read: Callable[[dict[str, Any]], T], most: int) -> T:
    """The result of `read` for the JSON object of a request; a long one is read in a thread pool. `state.arrival` has its
    size then.
    """
    content_type = request.headers.get("content-type", "").lower()
    media_type, _, parameters = content_type.partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]*)", parameters)
    if media_type.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8")):
        how = "send the header Content-Type: application/json, as curl does with --json"
        raise WrongMediaType(f"Content-Type must be application/json, in UTF-8; got {content_type[:64]!r}: {how}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip"):
        raise WrongMediaType("Content-Encoding must be gzip or identity")
    reading: Reading = request.state.reading
    with reading.unread_bodies.call(reading.arrival.turn) as call:
        body = await _read(request, most, call)
        request.state.arrival = arrival = replace(reading.arrival, size=len(body))
        if coding == "identity" and len(body) <= INLINE_BYTES:
            return read(parse_json(body))
        async with call.waiting():
            if coding == "gzip":
                body = await run_exclusive(partial(unzip, body, most), arrival)
                request.state.arrival = arrival = replace(arrival, size=len(body))
                call.came(len(body))
            try:
                async with asyncio.timeout_at(reading.deadline):
                    return await run_exclusive(lambda: read(parse_json(body)), arrival)
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed before the body was read") from error


async def _read(request: Request, most: int, call: IncomingBody) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:  # Python refuses to read thousands of digits
        raise TooLarge(f"the body must be at most {most} bytes; got {length[:20]}")
    body = bytearray()
    try:
        async with call.waiting(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                call.came(len(piece))
                if len(body) > most:
                    raise TooLarge(f"the body must be at most {most} bytes")
                if len(body) > LARGE:
                    long_bodies.check(call.turn)  # one that would be refused in the end is not read to its end
                    await yield_to_loop(LONG_BODIES)  # in each round of the loop one long body goes on, however many there are
    except SlowBody as error:
        raise SlowBody(f"the body must arrive within {BODY_SECONDS:g} seconds") from error
    except ClientDisconnect as error:
        raise ClientGone("the caller left before the end of the body") from error
    return bytes(body)


def unzip(body: bytes, most: int) -> bytes:
    """A gzip body of `most` bytes at most. Raises InvalidRequest, or TooLarge before more than that is made."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no gzip: {error}") from error
    if len(text) > most:
        raise TooLarge(f"the body must be at most {most} bytes once it is decompressed")
    if not reader.eof or reader.unused_data:
        raise InvalidRequest("the body is no gzip: it is cut, or something follows it")
    return text


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object, or InvalidRequest with a sentence that says what is wrong with it."""
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidRequest("the body must not begin with a byte order mark")
    _check_parts(body)
    doubled: list[_DuplicateKeys] = []
    hook = partial(_object, doubled)
    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=hook, parse_constant=_constant, parse_float=_float)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body must be UTF-8; byte {error.start} is not") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:  # Python reads no integer of over 4300 digits
        raise InvalidRequest("a number of the body is out of range") from error
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    escaped = b"\\u" in body  # the only way in for half a character, which no tokenizer and no answer can hold
    if escaped or doubled:
        _check(dict.fromkeys(document), "", surrogates=escaped)  # first: an error of a value contains its name
        for name, value in document.items():
            _check(value, name, surrogates=escaped)
    if isinstance(document, _DuplicateKeys):
        raise InvalidRequest(f"the body has the duplicate key {document.key!r}", _plain(document.key))
    return document


def _check_parts(body: bytes) -> None:
    """Before parsing: a parser that recurses must never see the depth, nor half a million parts."""
    outside, strings = _ANY_STRING.subn(b"", body, MAX_PARTS + 1)
    brackets = outside.translate(None, _NO_BRACKETS)
    depths = accumulate(map(_LEVELS.__getitem__, brackets[:MAX_PARTS]))
    if strings + len(brackets) > MAX_PARTS or max(depths, default=0) > MAX_DEPTH:
        raise _wrong_parts(body)


def _wrong_parts(body: bytes) -> InvalidRequest:
    """The error of a body that has too many parts, or is nested too deep: whichever comes first."""
    depth, end = 0, len(body)
    for count, token in enumerate(_STRING_OR_BRACKET.finditer(body)):
        if count >= MAX_PARTS:
            return InvalidRequest(f"the body has more than {MAX_PARTS} strings and brackets")
        depth += _LEVELS.get(token[0][0], 0)
        if depth > MAX_DEPTH:
            end = token.start()
            break
    steps = _steps(body[:end])
    place = "".join(steps).removeprefix(".")[:256]
    field = steps[0][1:] if steps[0].startswith(".") else None
    return InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels, at {place}", field)


def _steps(body: bytes) -> list[str]:
    """The steps to the place where the beginning of a body ends, such as `.tools` `[0]` `.function`."""
    steps: list[str] = []
    indexes: list[int | None] = []  # of the next item of each list that is open; None for an object
    name, end = "", 0
    for token in _STRING_OR_BRACKET.finditer(body):
        inside = indexes[-1] if indexes else None
        if inside is not None:
            inside = indexes[-1] = inside + body.count(b",", end, token.start())
        end = token.end()
        if token[0] in (b"[", b"{"):
            steps.append(f".{name}" if inside is None else f"[{inside}]")
            indexes.append(0 if token[0] == b"[" else None)
        elif token[0] in (b"]", b"}"):
            del steps[-1:], indexes[-1:]
        else:
            name = token[0][1:65].decode(errors="replace").removesuffix('"')
    return steps[1:]  # the body itself has no name


class _DuplicateKeys(dict[str, Any]):
    """An object in which a key stands twice; the parser does not know yet which field it belongs to."""

    key: str


def _object(found: list[_DuplicateKeys], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these pairs; one in which a key stands twice is also put into `found`."""
    document = dict(pairs)
    if len(document) == len(pairs):
        return document
    doubled = _DuplicateKeys(document)
    doubled.key = Counter(name for name, _ in pairs).most_common(1)[0][0][:64]
    found.append(doubled)
    return doubled


def _constant(text: str) -> float:
    raise InvalidRequest(f"the body is not valid JSON: {text} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InvalidRequest(f"the number {text[:64]} is out of range")
    return value


def _check(value: Any, field: str, *, surrogates: bool) -> None:
    """Refuse duplicate keys and lone surrogates anywhere in a field, by the field's name.

    A lone surrogate is half a character: no tokenizer, and no UTF-8 answer, can hold it.
    """
    if isinstance(value, str):
        if surrogates and _SURROGATE.search(value):
            text = "the body holds a lone surrogate (\\ud800 to \\udfff), which is no character"
            raise InvalidRequest(_where(field) + text, _plain(field))
    elif isinstance(value, dict):
        if isinstance(value, _DuplicateKeys):
            raise InvalidRequest(f"{_where(field)}the body has the duplicate key {value.key!r}", _plain(field))
        for key, item in value.items():
            _check(key, field, surrogates=surrogates)
            _check(item, field, surrogates=surrogates)
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, int):  # token ids, by the hundred thousand
                _check(item, field, surrogates=surrogates)


def _where(field: str) -> str:
    return f"{field[:64]}: " if field else ""


def _plain(field: str) -> str | None:
    """A field's name as an answer may hold it."""
    return None if not field or _SURROGATE.search(field) else field[:64]
