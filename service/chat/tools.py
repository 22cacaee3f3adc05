"""Function calling: the tools of a chat, how they may be called, and what is said of them beside their shapes. Errors name the
place."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jsonschema_rs import Draft4Validator, Draft7Validator, Draft202012Validator, ValidationError

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import shorten
from attend.model.text.schema import MAX_PLACE, OR_SHOWN
from attend.service.chat.calls import MAX_NAME, NAME
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import wrong
from attend.service.chat.parts import Tool

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 256 << 10
"""Of all tools together, as JSON."""
MAX_DESCRIPTION = 1 << 16
RESULTS = ("return", "response")
"""Names under which a tool has a schema of what it gives back, for templates that write it: of transformers, and of BFCL."""
TOOL_NAME = re.compile(f"{NAME.pattern}{{1,{MAX_NAME}}}")
_META = Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"})
_OLDER = (
    Draft7Validator({"$ref": "http://json-schema.org/draft-07/schema#"}),
    Draft4Validator({"$ref": "http://json-schema.org/draft-04/schema#"}),
)
"""They check schemas as data: the library's own check of a schema would fetch what its `$schema` names. llguidance carries out
what older drafts write in another way: lists as `items`, and an `exclusiveMinimum` that is true."""
Choice = Literal["auto", "none", "required"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools of a call for chat, and whether they have to be called."""

    tools: tuple[Tool, ...] = ()
    """Those that may be called; none where `choice` is "none"."""
    template_tools: tuple[dict[str, Any], ...] = ()
    """The same, as templates write them."""
    choice: Choice = "auto"
    parallel: bool = True
    """True if an answer may hold more than one call."""

    @property
    def is_enforced(self) -> bool:
        """True if calls have to follow the tools' schemas."""
        return self.choice == "required" or any(tool.strict for tool in self.tools)


NO_CALLS = Calling(choice="none")


def calling(
    tools: list[Tool],
    documents: list[dict[str, Any]],
    choice: Choice,
    names: dict[str, str] | None,
    parallel: bool,
    form: AnswerFormat,
) -> Calling:
    """The tools, written as `documents`, and how they may be called: those of `names`, where not all, by their places in the
    request. Raises InvalidRequest.
    """
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise wrong(tool.place.rpartition(".")[0] + ".name", "must be that of no other tool", tool.name)
        named[tool.name] = tool
    _check_size(documents)
    for name, place in (names or {}).items():
        if name not in named:
            raise wrong(place, "must be the name of one of the tools", name)
    callable_ = tuple(tools) if names is None else tuple(named[name] for name in names)
    if choice == "required" and not callable_:
        raise InvalidRequest("tool_choice: a call is required, which needs tools", "tool_choice")
    if choice == "none" or not named:
        return NO_CALLS
    if form.calls is None:
        unknown = "the chat template of this model shows no form of calls; --tool-parser can name one"
        raise NotSupported(f"tools: {unknown}", "tools")
    return Calling(callable_, tuple(documents), choice, parallel)


def check_schema(schema: dict[str, Any], place: str) -> None:
    """Raise InvalidRequest for a schema that is none. Only those that are enforced need to be any."""
    try:
        _META.validate(schema)
    except ValidationError as error:
        if not any(older.is_valid(schema) for older in _OLDER):
            where = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in error.instance_path)
            said = f"{place}{shorten(where, MAX_PLACE)} is no JSON schema: {error.message[:256]}"
            raise InvalidRequest(f"{said}; {OR_SHOWN}", place) from error


def _check_size(documents: list[dict[str, Any]]) -> None:
    """Raise InvalidRequest for longer schemas than are taken."""
    functions = [document["function"] for document in documents]
    written = [function[key] for function in functions for key in ("parameters", *RESULTS) if function.get(key) is not None]
    try:
        size = sum(len(json.dumps(schema)) for schema in written)
    except RecursionError as error:
        raise InvalidRequest("tools: a schema is nested too deeply", "tools") from error
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"tools may have schemas of at most {MAX_SCHEMA_BYTES} bytes in all; got {size}", "tools")
