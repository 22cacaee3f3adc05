"""Validation of chat messages beside their shapes. Errors name the place."""

import json
import math
from collections.abc import Callable, Sized
from typing import Any

from attend.model.errors import InvalidRequest
from attend.model.params import describe
from attend.model.text.chat_shapes import join_all

MAX_MESSAGES = 2048
MAX_CALLS = 128
"""Tool calls in one message."""
MAX_NAME = 256
MAX_DEPTH = 128
"""Levels of JSON inside each other, in a body or in a text. A schema has three for a list of objects, five if it may be null.
What walks JSON by recursion, here and in libraries, has room for more: see `tests/service/test_deep_schemas.py`."""
INVALID_JSON = "INVALID_JSON"
"""The key under which templates get arguments that are no JSON object, as Anthropic's documents and pydantic-ai name it."""

_Turn = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Messages that are one, and the results of its calls."""


def check_count(messages: Sized) -> None:
    """Raise InvalidRequest unless there are so many messages as are read."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages; got {len(messages)}", "messages")


def results_after_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each result of a tool right after its call, as templates want them.

    Until the results of a message's calls have come, what the assistant says belongs to that message; what others say waits
    for the results. After words of the user the assistant's are a message of their own.
    """
    answered = _answered_calls(messages)
    turn: _Turn = ([], [])
    turns, turn_of = list[_Turn](), dict[str, _Turn]()
    waiting, is_open = set[str](), False
    for at, message in enumerate(messages):
        if message["role"] == "tool" and message["tool_call_id"] in turn_of:
            turn_of.pop(message["tool_call_id"])[1].append(message)
            waiting.discard(message["tool_call_id"])
            continue
        is_open = is_open and bool(waiting) and message["role"] != "user"
        if is_open and message["role"] == "assistant":
            turn[0].append(message)
        else:
            turns.append(([message], []))
        if at in answered:
            if not is_open:
                turn, waiting = turns[-1], set()
            waiting |= answered[at]
            turn_of |= dict.fromkeys(answered[at], turn)
            is_open = True
    return [each for said, results in turns for each in (join_all(said), *results)]


def _answered_calls(messages: list[dict[str, Any]]) -> dict[int, set[str]]:
    """By the places of messages with calls: the ids of those that get a result, before a call of the same id."""
    answered, results = {}, set[str]()
    for at in reversed(range(len(messages))):
        message = messages[at]
        if message["role"] == "tool":
            results.add(message["tool_call_id"])
        elif own := results.intersection(call["id"] for call in message.get("tool_calls", ())):
            answered[at] = own
            results -= own
    return answered


def arguments_of(text: str) -> dict[str, Any]:
    """An object, since templates go through its items. A call that a limit cut comes back too, and its arguments are none."""
    try:
        return json_object(text, "arguments") if text.strip() else {}
    except InvalidRequest:
        return {INVALID_JSON: text}


def arguments_json(text: str) -> str:
    """The JSON of `arguments_of`, in which each number has the digits that it was written with."""
    try:
        return text if text.strip() and json_object(text, "arguments", str) else "{}"
    except InvalidRequest:
        return json.dumps({INVALID_JSON: text})


def json_object(text: str, place: str, read_number: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The object that a text of JSON holds. Raises InvalidRequest.

    Python's numbers hold no 1e999, and no 4301 digits: without `read_number` these are none.
    """
    wanted = "must be a JSON object in a string"
    try:
        value = json.loads(text, parse_int=read_number, parse_float=read_number or _float, parse_constant=_float)
    except (ValueError, RecursionError) as error:
        raise wrong(place, wanted, text) from error
    if not isinstance(value, dict) or ("\\u" in text and not _is_unicode(value)):
        raise wrong(place, wanted, text)
    if _is_deep(value):
        raise wrong(place, f"may be nested at most {MAX_DEPTH} levels deep", text)
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _is_deep(value: Any) -> bool:
    """True if a JSON value has more levels than are taken."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for each in inside for one in each if isinstance(one, dict | list)]
    return bool(level)


def _is_unicode(value: dict[str, Any]) -> bool:
    """True if texts that were written with escapes hold no half of a surrogate pair, which no UTF-8 can hold."""
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


def wrong(place: str, requirement: str, value: Any) -> InvalidRequest:
    """The error of a value that is not what is wanted in its place."""
    return InvalidRequest(f"{place} {requirement}; got {describe(value)}", place)
