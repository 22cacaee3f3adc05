"""The messages and the tools of a chat: their shapes, which check them and are shown by /openapi.json, and what they mean."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictStr, WithJsonSchema, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from attend.model.errors import NotSupported
from attend.model.params import at_most
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME, arguments_of, check_count, wrong
from attend.service.chat.parts import Tool
from attend.service.chat.tools import MAX_DESCRIPTION, MAX_TOOLS, NAME, Calling, Choice, calling
from attend.service.contract.shapes import UNSUPPORTED, WRONG, Or, Shape, Sifted, off
from attend.service.contract.validation import validated

closed = with_config(Shape.model_config)
"""For a TypedDict: no other fields, and its texts are descriptions."""
open_to_more = with_config(ConfigDict(**Shape.model_config | ConfigDict(extra="ignore")))
"""The same, but other fields are left out."""
Name = Annotated[StrictStr, Field(max_length=MAX_NAME)]
Function = Annotated[Literal["function"], Field(description="What kind of tool it is.")]
Nothing = Annotated[
    Annotated[list[Any], Field(max_length=0)] | None,
    Or("is not supported in a message with this role", UNSUPPORTED),
    WithJsonSchema(off("Taken as clients send it back with an answer: only where it is empty.", [])),
]


@closed
class TextPart(TypedDict):
    """A part of what is said."""

    type: Annotated[Literal["text"], Or("must be 'text', as this model takes no other input", UNSUPPORTED)]
    """Text is all that a part may be."""
    text: StrictStr
    """What is said."""


Parts = Annotated[list[Annotated[TextPart, Sifted()]], Field(min_length=1, fail_fast=True)]
Content = Annotated[
    StrictStr | Parts,
    Field(description="The text, or parts of it, joined by line ends where the chat template writes no parts."),
]
"""Described here: pydantic reads no texts that a TypedDict inherits."""


@closed
class _Message(TypedDict):
    name: NotRequired[Annotated[Name | None, Field(description="Who it is, for templates that say so.")]]
    function_call: NotRequired[Nothing]
    refusal: NotRequired[Nothing]
    audio: NotRequired[Nothing]
    annotations: NotRequired[Nothing]


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
    """What the model is told."""

    role: Literal["system", "developer", "user"]
    """Who says it; `developer` is `system`."""
    tool_call_id: NotRequired[None]
    """Nothing."""


@closed
class ToolMessage(_Said):
    """What a tool answers."""

    role: Literal["tool"]
    """Who says it; `developer` is `system`."""
    tool_call_id: Name
    """The call that the tool answers, of a message before."""


@open_to_more
class PastFunction(TypedDict):
    """What was called."""

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
    """What the model answered."""

    role: Literal["assistant"]
    """Who says it; `developer` is `system`."""
    content: NotRequired[StrictStr | Parts | None]
    """The text."""
    tool_call_id: NotRequired[None]
    """Nothing."""
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
    Annotated[TextMessage, Sifted()] | Annotated[ToolMessage, Sifted()] | Annotated[AssistantMessage, Sifted()],
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


@closed
class DeclaredFunction(TypedDict("_Returning", {"return": NotRequired[Result]})):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(pattern=f"^{NAME.pattern}$"), Or("must be 1 to 64 letters, digits and _ . -")]
    """Its name, which no other tool has."""
    description: NotRequired[Annotated[StrictStr, Field(max_length=MAX_DESCRIPTION)] | None]
    """What it does."""
    parameters: NotRequired[Annotated[dict[StrictStr, Any], AfterValidator(_of_object), Or(_OF_OBJECT)] | None]
    """A JSON schema of its arguments, which are an object: of draft 2020-12, 7 or 4 where calls are enforced."""
    strict: NotRequired[StrictBool | None]
    """Arguments always obey the schema. Default: false."""
    response: NotRequired[Result]


@closed
class FunctionTool(TypedDict):
    """A tool."""

    type: Function
    function: Annotated[DeclaredFunction, Sifted()]
    """What may be called."""


Tools = Annotated[list[Annotated[FunctionTool, Sifted()]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Shape):
    """The function that is to be called."""

    name: StrictStr
    """The name of one of the request's tools."""


class NamedTool(Shape):
    """The only tool that may be called, and has to be."""

    type: Literal["function"]
    """A function by its name."""
    function: NamedFunction
    """Which one."""


ToolChoice = Choice | NamedTool


class _Conversation(Shape):
    messages: Messages


class _Toolbox(Shape):
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


def messages_of(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages as templates take them: a role, a text or its parts, what else was given. Raises InvalidRequest."""
    check_count(messages)
    called: set[str] = set()
    read = validated(_Conversation, {"messages": messages}, exact=True).messages
    return [_for_template(message, index, called) for index, message in enumerate(read)]


def _for_template(message: TextMessage | ToolMessage | AssistantMessage, index: int, called: set[str]) -> dict[str, Any]:
    """One message. `called` has the ids of the calls so far, and gets those of this message."""
    role = message["role"]
    shown: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": message.get("content") or ""}
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


def _call_for_template(call: PastCall) -> dict[str, Any]:
    """A call, its arguments as an object: templates write them out themselves."""
    function = {"name": call["function"]["name"], "arguments": arguments_of(call["function"]["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def calling_of(tools: Any, choice: Any, parallel: bool | None, form: AnswerFormat) -> Calling:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises InvalidRequest."""
    if isinstance(tools, list):
        at_most("tools", tools, MAX_TOOLS, "tools")
    read = validated(_Toolbox, {"tools": tools, "tool_choice": choice}, exact=True, unknown=NotSupported)
    called = [_tool(tool["function"], index) for index, tool in enumerate(read.tools or ())]
    named = read.tool_choice
    if isinstance(named, NamedTool):
        return calling(called, tools or [], "required", named.function.name, parallel is not False, form)
    return calling(called, tools or [], named or "auto", None, parallel is not False, form)


def _tool(function: DeclaredFunction, index: int) -> Tool:
    parameters = function.get("parameters")
    schema = _NO_PARAMETERS if parameters is None else parameters
    return Tool(function["name"], schema, bool(function.get("strict")), index)


_NO_PARAMETERS = {"type": "object", "properties": {}}
