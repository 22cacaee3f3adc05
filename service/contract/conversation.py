"""Messages and tools of a chat: shapes that validate them and document them in /openapi.json."""

from typing import Annotated, Any, Literal, NotRequired, TypeGuard

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from attend.model.errors import NotSupported
from attend.model.params import at_most
from attend.service.chat.calls import MAX_NAME as MAX_TOOL_NAME
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME, arguments_of, check_count, wrong
from attend.service.chat.parts import Tool
from attend.service.chat.tools import MAX_DESCRIPTION, MAX_TOOLS, TOOL_NAME, Calling, Choice, calling
from attend.service.contract.media import MediaPart, kind_of_part, refuse_media, without_media
from attend.service.contract.shapes import UNSUPPORTED, WRONG, NullAsAbsent, Or, Shape, closed, null_or_one_of, open_to_more
from attend.service.contract.validation import validate
from attend.service.remarks import Remarks

Name = Annotated[StrictStr, Field(max_length=MAX_NAME)]
Function = Annotated[Literal["function"], Field(description="What kind of tool it is.")]
Nothing = Annotated[
    Annotated[list[Any], Field(max_length=0)] | None,
    Or("is not supported in a message with this role", UNSUPPORTED),
    WithJsonSchema(null_or_one_of("Taken as clients send it back with an answer: only where it is empty.", [])),
]


_TEXT_ALONE = "must be 'text': this server takes no other input"


@closed
class TextPart(TypedDict):
    """A part of a message: a text."""

    type: Annotated[Literal["text"], Or(_TEXT_ALONE, UNSUPPORTED)]
    """Text is all that a part may be."""
    text: StrictStr
    """The text of the part."""


@closed
class RefusalPart(TypedDict):
    """A part that says that a model, somewhere else, did not answer. It is left out."""

    type: Literal["refusal"]
    """What kind of part it is."""
    refusal: StrictStr
    """Why the model did not answer, in its words."""


Part = Annotated[
    Annotated[TextPart, NullAsAbsent(), Tag("a text")] | Annotated[MediaPart, Tag("media")],
    Discriminator(lambda part: "media" if kind_of_part(part) == "media" else "a text"),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Content = Annotated[
    StrictStr | Parts,
    Field(description="The text, or parts of it, joined by line ends where the chat template writes no parts."),
]
"""Described here: pydantic reads no texts that a TypedDict inherits."""
AnswerPart = Annotated[
    Annotated[TextPart, NullAsAbsent(), Tag("a text")] | Annotated[RefusalPart, NullAsAbsent(), Tag("a refusal")],
    Discriminator(lambda part: "a refusal" if isinstance(part, dict) and part.get("type") == "refusal" else "a text"),
]
AnswerParts = Annotated[list[AnswerPart], Field(fail_fast=True)]
Left = Annotated[Any, Field(description="Of an answer, as clients send it back; left out.")]


@closed
class _Message(TypedDict):
    name: NotRequired[Annotated[Name | None, Field(description="Who it is, for templates that say so.")]]
    function_call: NotRequired[Nothing]
    refusal: NotRequired[Left]
    audio: NotRequired[Nothing]
    annotations: NotRequired[Left]


@closed
class _Said(_Message):
    content: Content
    tool_calls: NotRequired[Nothing]
    reasoning_content: NotRequired[Nothing]
    reasoning: NotRequired[Nothing]
    parsed: NotRequired[Nothing]
    provider_specific_fields: NotRequired[Nothing]


@closed
class TextMessage(_Said):
    """A message to the model: of the system or the user."""

    role: Literal["system", "developer", "user"]
    """Who says it; `developer` is `system`."""
    tool_call_id: NotRequired[None]
    """Only messages of tools have one."""


@closed
class ToolMessage(_Said):
    """A message with the answer of a tool."""

    role: Literal["tool"]
    """Who says it; `developer` is `system`."""
    tool_call_id: Name
    """The call that the tool answers, of a message before."""


@open_to_more
class PastFunction(TypedDict):
    """The function that was called."""

    name: Name
    """The name of one of the request's tools."""
    arguments: StrictStr
    """A JSON object, or as much of it as was written."""


@open_to_more
class PastCall(TypedDict):
    """A call of a tool, as it came. Clients add fields to it."""

    id: Name
    """What the message with the tool's answer names."""
    type: NotRequired[Function]
    function: PastFunction
    """Its name and its arguments."""


@closed
class AssistantMessage(_Message):
    """A message that the model wrote earlier."""

    role: Literal["assistant"]
    """Who says it; `developer` is `system`."""
    content: NotRequired[StrictStr | AnswerParts | None]
    """The text of the message, or its parts."""
    tool_call_id: NotRequired[None]
    """Only messages of tools have one."""
    tool_calls: NotRequired[Annotated[list[PastCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None]
    """The calls of tools in it, as they came."""
    reasoning_content: NotRequired[StrictStr | None]
    """What the model wrote for itself, under either name; the chat template keeps it or drops it."""
    reasoning: NotRequired[StrictStr | None]
    """What the model wrote for itself, under either name; the chat template keeps it or drops it."""
    parsed: NotRequired[Any]
    """What a client has added to the message; not looked at."""
    provider_specific_fields: NotRequired[Any]
    """What a client has added to the message; not looked at."""


Message = Annotated[
    Annotated[TextMessage, NullAsAbsent()]
    | Annotated[ToolMessage, NullAsAbsent()]
    | Annotated[AssistantMessage, NullAsAbsent()],
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError(WRONG, _OF_OBJECT)
    return schema


_OF_OBJECT = "must be a JSON schema of an object"
Result = Annotated[
    Annotated[dict[StrictStr, Any], Or("must be a JSON schema of what the function gives back")] | None,
    Field(description="A schema of what it gives back, for templates."),
]


FunctionName = Annotated[
    StrictStr, Field(pattern=f"^{TOOL_NAME.pattern}$"), Or(f"must be 1 to {MAX_TOOL_NAME} letters, digits and _ . -")
]
FunctionText = Annotated[StrictStr, Field(max_length=MAX_DESCRIPTION)] | None
FunctionSchema = Annotated[dict[StrictStr, Any], AfterValidator(_of_object), Or(_OF_OBJECT)] | None


@closed
class DeclaredFunction(TypedDict("_Returning", {"return": NotRequired[Result]})):
    """A function that the model may call."""

    name: FunctionName
    """Its name, which no other tool has."""
    description: NotRequired[FunctionText]
    """What the function does, for the model."""
    parameters: NotRequired[FunctionSchema]
    """A JSON schema of its arguments, which are an object: of draft 2020-12, 7 or 4 where calls are enforced."""
    strict: NotRequired[StrictBool | None]
    """Arguments always obey the schema. Default: false."""
    response: NotRequired[Result]


@closed
class FunctionTool(TypedDict):
    """A tool that the model may call."""

    type: Function
    function: Annotated[DeclaredFunction, NullAsAbsent()]
    """The function that may be called."""


@open_to_more
class OtherTool(TypedDict):
    """A tool that is no function. It is not shown to the model."""

    type: Annotated[StrictStr, WithJsonSchema({"type": "string", "not": {"const": "function"}})]
    """What kind of tool it is."""


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "another tool" if isinstance(kind, str) and kind != "function" else "a function tool"


AnyTool = Annotated[
    Annotated[FunctionTool, NullAsAbsent(), Tag("a function tool")] | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_kind_of_tool),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Shape):
    """A function that may be called."""

    name: StrictStr
    """The name of one of the request's tools."""


class NamedTool(Shape):
    """The only tool that may be called, and has to be."""

    type: Literal["function"]
    """The choice is a function by its name."""
    function: NamedFunction
    """The function that has to be called."""


class Allowed(Shape):
    """A part of the tools, to which the choice is limited."""

    mode: Literal["auto", "required"]
    """True if one has to be called."""
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
    """Those that may be called. The others are shown to the model, so that the prompt stays the same."""


class AllowedTools(Shape):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    """The choice is limited to a part of the tools."""
    allowed_tools: Allowed
    """The tools that may be called."""


ToolChoice = Choice | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


class _Conversation(Shape):
    messages: Messages


class _Toolbox(Shape):
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


def messages_of(messages: list[Any], remarks: Remarks | None = None) -> list[dict[str, Any]]:
    """The messages as templates take them: a role, a text or its parts, what else was given. Raises InvalidRequest."""
    check_count(messages)
    remarks = Remarks(strict=True) if remarks is None else remarks
    called: set[str] = set()
    read = validate(_Conversation, {"messages": messages}, remarks, exact=True).messages
    newest = max((index for index, message in enumerate(read) if message["role"] == "user"), default=-1)
    if newest >= 0 and isinstance(content := read[newest]["content"], list):
        refuse_media(content, f"messages[{newest}].content", f" {_TEXT_ALONE}; got {{got}}")
    return [_for_template(message, index, called, remarks) for index, message in enumerate(read)]


def _for_template(
    message: TextMessage | ToolMessage | AssistantMessage, index: int, called: set[str], remarks: Remarks
) -> dict[str, Any]:
    """One message. `called` has the ids of the calls so far, and gets those of this message."""
    role = message["role"]
    shown: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(message, remarks)}
    name = message.get("name")
    if name is not None:
        shown["name"] = name
    if message["role"] == "assistant":
        for field in ("reasoning", "reasoning_content"):
            if (reasoning := message.get(field)) is not None:
                shown["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            called.update(call["id"] for call in calls)
            shown["tool_calls"] = [_call_for_template(call) for call in calls]
    elif message["role"] == "tool":
        number = message["tool_call_id"]
        if number not in called:
            wanted = "must be the id of a call in an assistant's message before this one"
            raise wrong(f"messages[{index}].tool_call_id", wanted, number)
        shown["tool_call_id"] = number
    return shown


def _content(message: TextMessage | ToolMessage | AssistantMessage, remarks: Remarks) -> str | list[Any]:
    """The text of a message, or its parts. What is left out is said."""
    for name in ("refusal", "annotations"):
        if message.get(name):
            remarks.ignore(name)
    content = message.get("content")
    if content == []:
        remarks.ignore("content")
    if not isinstance(content, list):
        return content or ""
    if any(part["type"] == "refusal" for part in content):
        remarks.ignore("refusal")
        content = [part for part in content if part["type"] != "refusal"]
    return without_media(content, remarks) or ""


def _call_for_template(call: PastCall) -> dict[str, Any]:
    """A call, its arguments as an object: templates write them out themselves."""
    function = {"name": call["function"]["name"], "arguments": arguments_of(call["function"]["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def calling_of(tools: Any, choice: Any, parallel: bool | None, form: AnswerFormat, remarks: Remarks | None = None) -> Calling:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises InvalidRequest."""
    if isinstance(tools, list):
        at_most("tools", tools, MAX_TOOLS, "tools")
    remarks = Remarks(strict=True) if remarks is None else remarks
    read = validate(_Toolbox, {"tools": tools, "tool_choice": choice}, remarks, exact=True, unknown=NotSupported)
    functions = {index: tool for index, tool in enumerate(read.tools or ()) if _is_function(tool, index, remarks)}
    declared = [_tool(tool["function"], index) for index, tool in functions.items()]
    shown = [_template_tool(tools[index]) for index in functions]
    parallel = parallel is not False
    match read.tool_choice:
        case NamedTool(function=function):
            return calling(declared, shown, "required", (function.name,), parallel, form)
        case AllowedTools(allowed_tools=allowed):
            return calling(declared, shown, allowed.mode, tuple(tool.function.name for tool in allowed.tools), parallel, form)
        case choice:
            return calling(declared, shown, choice or "auto", None, parallel, form)


def _is_function(tool: FunctionTool | OtherTool, index: int, remarks: Remarks) -> TypeGuard[FunctionTool]:
    return is_callable(tool, index, remarks)


def is_callable(tool: Any, index: int, remarks: Remarks, own: str = "function") -> bool:
    """True if a tool can be called: it is of the type `own`. That another one is left out is said, or an error by name."""
    kind = tool.get("type")
    if kind is None or kind == own:
        return True
    if remarks.strict:
        raise wrong(f"tools[{index}].type", f"must be '{own}'", kind)
    remarks.ignore(f"tools.{kind}")
    return False


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates write it: in the caller's order, without what is ignored."""
    function = {name: value for name, value in tool["function"].items() if name in _OF_FUNCTION}
    return {name: function if name == "function" else value for name, value in tool.items() if name in _OF_TOOL}


_OF_FUNCTION = DeclaredFunction.__required_keys__ | DeclaredFunction.__optional_keys__
_OF_TOOL = FunctionTool.__required_keys__


def _tool(function: DeclaredFunction, index: int) -> Tool:
    return function_tool(function["name"], function.get("parameters"), function.get("strict"), index)


def function_tool(name: str, parameters: dict[str, Any] | None, strict: bool | None, index: int) -> Tool:
    """A function that the model may call, by its place in the caller's list."""
    return Tool(name, _NO_PARAMETERS if parameters is None else parameters, bool(strict), index)


def template_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A function as templates write it, whose caller writes it otherwise."""
    given = {"description": description, "parameters": parameters}
    return {"type": "function", "function": {"name": name} | {key: value for key, value in given.items() if value is not None}}


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
