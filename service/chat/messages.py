"""The messages of a chat, checked, as templates take them. Errors name the place."""

import json
from collections.abc import Sized
from typing import Any

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe

MAX_MESSAGES = 2048
MAX_CALLS = 128
"""Calls in one message."""
MAX_NAME = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning")
"""The names under which an assistant's reasoning comes back."""
NULL_ONLY = ("function_call", "refusal", "audio", "annotations")
"""What a client sends back with an assistant's message, as it got it: only where it says nothing."""
BY_CLIENTS = ("parsed", "provider_specific_fields")
"""What OpenAI's client and LiteLLM add to an assistant's message, and send back with it; all that it says, the message says."""
INVALID_JSON = "INVALID_JSON"
"""The key under which templates get arguments that are no JSON object, as Anthropic's documents and pydantic-ai name it."""
_OF_ASSISTANT = ("tool_calls", *REASONING, *BY_CLIENTS, *NULL_ONLY)


def messages_of(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages: a role, a text or its parts, what else was given. Raises InvalidRequest."""
    check_count(messages)
    called: set[str] = set()
    return [_message(message, f"messages[{index}]", called) for index, message in enumerate(messages)]


def check_count(messages: Sized) -> None:
    """Raise InvalidRequest unless there are so many messages as are read."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages; got {len(messages)}", "messages")


def _message(message: Any, place: str, called: set[str]) -> dict[str, Any]:
    """One message. `called` has the ids of the calls so far, and gets those of this message."""
    if not isinstance(message, dict):
        raise wrong(place, "must be an object with a role and a content", message)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}", role)
    read = {"role": "system" if role == "developer" else role, "content": _content(message, role, f"{place}.content")}
    for name, value in message.items():
        here = f"{place}.{name[:64]}"
        known = ("role", "content", "name", *_OF_ASSISTANT, *(("tool_call_id",) if role == "tool" else ()))
        if name not in known and value is not None:
            raise InvalidRequest(f"{here} is not a field of a message with this role", here)
        if value is None or name in ("role", "content") or (name in BY_CLIENTS and role == "assistant"):
            continue
        if name == "tool_calls" and role == "assistant":
            read |= _calls(value, here, called)
        elif name in REASONING and role == "assistant":
            read["reasoning_content"] = _reasoning(value, here)
        elif name in _OF_ASSISTANT:
            if value != []:
                raise NotSupported(f"{here} is not supported in a message with this role; got {describe(value)}", here)
        else:
            read[name] = short(value, here)
    if role == "tool":
        _check_answer(read, called, place)
    return read


def _check_answer(read: dict[str, Any], called: set[str], place: str) -> None:
    """What a tool answered belongs to a call before it."""
    here = f"{place}.tool_call_id"
    if "tool_call_id" not in read:
        raise InvalidRequest(f"{here} is required: the id of the call that this message answers", here)
    if read["tool_call_id"] not in called:
        raise wrong(here, "must be the id of a call in an assistant's message before this one", read["tool_call_id"])


def _calls(value: Any, place: str, called: set[str]) -> dict[str, Any]:
    if not isinstance(value, list):
        raise wrong(place, "must be a list of calls", value)
    if len(value) > MAX_CALLS:
        raise InvalidRequest(f"{place} may hold at most {MAX_CALLS} calls; got {len(value)}", place)
    calls = [_call(call, f"{place}[{index}]", called) for index, call in enumerate(value)]
    return {"tool_calls": calls} if calls else {}


def _call(call: Any, place: str, called: set[str]) -> dict[str, Any]:
    """A call, its arguments as an object: templates write them out themselves."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise wrong(place, "must be an object with an id and a function", call)
    if call.get("type", "function") != "function":
        raise wrong(f"{place}.type", "must be 'function'", call["type"])
    number = short(call.get("id"), f"{place}.id")
    called.add(number)
    function, here = call["function"], f"{place}.function"
    name = short(function.get("name"), f"{here}.name")
    return {"id": number, "type": "function", "function": {"name": name, "arguments": _arguments(function, here)}}


def _arguments(function: dict[str, Any], place: str) -> dict[str, Any]:
    """An object, since templates go through its items. A call that a limit cut comes back too, and its arguments are none."""
    text, here = function.get("arguments"), f"{place}.arguments"
    if not isinstance(text, str):
        raise wrong(here, "must be a string", text)
    try:
        return json_object(text, here) if text.strip() else {}
    except InvalidRequest:
        return {INVALID_JSON: text}


def json_object(text: Any, place: str) -> dict[str, Any]:
    """The object that a text of JSON holds. Raises InvalidRequest."""
    wanted = "must be a JSON object in a string"
    if not isinstance(text, str):
        raise wrong(place, wanted, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(place, wanted, text) from error
    if not isinstance(value, dict):
        raise wrong(place, wanted, text)
    return value


def _reasoning(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise wrong(place, "must be a string", value)
    return value


def _content(message: dict[str, Any], role: str, place: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if content is None and role == "assistant":
        return ""  # a turn that was a tool call or a refusal alone
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(place, "must be a string or a list of at least one text part", content)
    return [{"type": "text", "text": _part(part, f"{place}[{index}]")} for index, part in enumerate(content)]


def _part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise wrong(place, "must be an object with a type", part)
    kind = part.get("type")
    if kind != "text":
        described = describe(kind)
        raise NotSupported(f"{place}.type must be 'text', as this model takes no other input; got {described}", f"{place}.type")
    for name in (name for name in part if name not in ("type", "text") and part[name] is not None):
        here = f"{place}.{name[:64]}"
        raise InvalidRequest(f"{here} is not a field of a text part", here)
    if not isinstance(part.get("text"), str):
        raise wrong(f"{place}.text", "must be a string", part.get("text"))
    text: str = part["text"]
    return text


def short(value: Any, place: str) -> str:
    """A text that is a name or an id. Raises InvalidRequest."""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise wrong(place, f"must be a string of at most {MAX_NAME} characters", value)
    return value


def wrong(place: str, wanted: str, value: Any) -> InvalidRequest:
    """The error of a value that is not what is wanted in its place."""
    return InvalidRequest(f"{place} {wanted}; got {describe(value)}", place)
