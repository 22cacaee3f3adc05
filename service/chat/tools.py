"""The tools of a chat and how they may be called, checked. Errors name the place."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from jsonschema_rs import Draft202012Validator, ValidationError

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.service.chat.forms import AnswerForm
from attend.service.chat.messages import wrong
from attend.service.chat.parts import Tool

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 256 << 10
"""Of all tools together, as JSON."""
MAX_DESCRIPTION = 16 << 10
RESULTS = ("return", "response")
"""Names under which a tool has a schema of what it gives back, for templates that write it: of transformers, and of BFCL."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_META = Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"})
"""Checks schemas as data: the library's own check of a schema would fetch what its `$schema` names."""
CHOICES = ("auto", "none", "required")
Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools of a call for chat, and whether they have to be called."""

    tools: tuple[Tool, ...] = ()
    """Those that may be called; none where `choice` is "none"."""
    shown: tuple[dict[str, Any], ...] = ()
    """The same, as templates write them."""
    choice: Choice = "auto"
    parallel: bool = True
    """Whether an answer may hold more than one call."""

    @property
    def is_enforced(self) -> bool:
        """Whether calls have to follow the tools' schemas."""
        return self.choice == "required" or any(tool.strict for tool in self.tools)


NO_CALLS = Calling(choice="none")


def calling_of(tools: Any, choice: Any, parallel: bool | None, form: AnswerForm) -> Calling:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises InvalidRequest."""
    documents = [] if tools is None else tools
    if not isinstance(documents, list):
        raise wrong("tools", "must be a list of tools", tools)
    if len(documents) > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold at most {MAX_TOOLS} tools; got {len(documents)}", "tools")
    read: dict[str, Tool] = {}
    for index, document in enumerate(documents):
        tool = _tool(document, f"tools[{index}]")
        if tool.name in read:
            raise wrong(f"tools[{index}].function.name", "must be that of no other tool", tool.name)
        read[tool.name] = tool
    _check_schemas(documents)
    kind, name = _choice(choice, read)
    if kind == "none" or not read:
        return NO_CALLS
    if form.calls is None:
        unknown = "the chat template of this model shows no form of calls; --tool-parser can name one"
        raise NotSupported(f"tools: {unknown}", "tools")
    return Calling(tuple(read.values()) if name is None else (read[name],), tuple(documents), kind, parallel is not False)


def _tool(document: Any, place: str) -> Tool:
    if not isinstance(document, dict):
        raise wrong(place, "must be an object with a type and a function", document)
    if document.get("type") != "function":
        raise wrong(f"{place}.type", "must be 'function'", document.get("type"))
    _only(document, ("type", "function"), place)
    function, here = document.get("function"), f"{place}.function"
    if not isinstance(function, dict):
        raise wrong(here, "must be an object with a name", function)
    _only(function, ("name", "description", "parameters", "strict", *RESULTS), here)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{here}.name", "must be 1 to 64 letters, digits and _ . -", name)
    description = function.get("description")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        raise wrong(f"{here}.description", f"must be a string of at most {MAX_DESCRIPTION} characters", description)
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong(f"{here}.strict", "must be a boolean", strict)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise wrong(f"{here}.parameters", "must be a JSON schema of an object", parameters)
    for key in RESULTS:
        if not isinstance(function.get(key, {}), dict | None):
            raise wrong(f"{here}.{key}", "must be a JSON schema of what the function gives back", function[key])
    return Tool(name, parameters, bool(strict))


def _check_schemas(documents: list[dict[str, Any]]) -> None:
    """Raise InvalidRequest for a schema that is none, and for more of them than is checked."""
    functions = [document["function"] for document in documents]
    written = [function[key] for function in functions for key in ("parameters", *RESULTS) if function.get(key) is not None]
    try:
        size = sum(len(json.dumps(schema)) for schema in written)
    except RecursionError as error:
        raise InvalidRequest("tools: a schema is nested too deeply", "tools") from error
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"tools may have schemas of at most {MAX_SCHEMA_BYTES} bytes in all; got {size}", "tools")
    for index, function in enumerate(functions):
        place = f"tools[{index}].function.parameters"
        try:
            _META.validate(function.get("parameters") or {})
        except ValidationError as error:
            where = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in error.instance_path)
            raise InvalidRequest(f"{place}{where[:256]} is no JSON schema: {error.message[:256]}", place) from error


def _choice(value: Any, tools: dict[str, Tool]) -> tuple[Choice, str | None]:
    """How tools may be called, and the name of the only one that may be."""
    if value is None:
        return "auto", None
    if isinstance(value, str) and value in CHOICES:
        if value == "required" and not tools:
            raise InvalidRequest("tool_choice: 'required' needs tools", "tool_choice")
        return value, None  # type: ignore[return-value]  # the values of Choice
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("function"), dict):
        raise wrong("tool_choice", f"must be {', '.join(CHOICES)} or a function by its name", value)
    _only(value, ("type", "function"), "tool_choice")
    _only(value["function"], ("name",), "tool_choice.function")
    name = value["function"].get("name")
    if not isinstance(name, str) or name not in tools:
        raise wrong("tool_choice.function.name", "must be the name of one of the tools", name)
    return "required", name


def _only(value: dict[str, Any], known: tuple[str, ...], place: str) -> None:
    for key in value:
        if key not in known and value[key] is not None:
            here = f"{place}.{key[:64]}"
            raise NotSupported(f"{here} is not a field of a tool; got {describe(value[key])}", here)
