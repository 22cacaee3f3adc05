"""The messages and the tools of a chat: their shapes, which check them and are shown by /openapi.json, and what they mean."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from attend.model.errors import NotSupported
from attend.model.params import at_most
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME, arguments_of, check_count, wrong
from attend.service.chat.parts import Tool
from attend.service.chat.tools import MAX_DESCRIPTION, MAX_TOOLS, NAME, Calling, Choice, calling
from attend.service.contract.shapes import UNSUPPORTED, WRONG, Or, Schema, Shape, body
from attend.service.contract.validation import validated

Name = Annotated[StrictStr, Field(max_length=MAX_NAME)]
Function = Annotated[Literal["function"], Field(description="What kind of tool it is.")]


class TextPart(Shape):
    """A part of what is said."""

    type: Annotated[Literal["text"], Or("must be 'text', as this model takes no other input", UNSUPPORTED)]
    """Text is all that a part may be."""
    text: StrictStr
    """What is said."""


Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


OF_ASSISTANTS = ("tool_calls", "reasoning_content", "reasoning", "parsed", "provider_specific_fields")
NEVER = ("function_call", "refusal", "audio", "annotations")
"""What clients send back with an assistant's message, as they got it."""
_NOTHING: Schema = {"enum": [None, []], "description": "Taken as clients send it back with an answer: only where it is empty."}
_NO_CALL: Schema = {"type": "null", "description": "Nothing."}


def _message(*empty: str, **others: Schema) -> ConfigDict:
    """What /openapi.json says of a message beside its fields."""
    return body(**dict.fromkeys(empty, _NOTHING), **others)


class _Said(Shape):
    """What all messages have that are not the model's."""

    empty = (*NEVER, *OF_ASSISTANTS)

    content: StrictStr | Parts
    """The text, or parts of it, joined by line ends where the chat template writes no parts."""
    name: Name | None = None
    """Who it is, for templates that say so."""


class TextMessage(_Said):
    """What the model is told."""

    model_config = _message(*_Said.empty, tool_call_id=_NO_CALL)

    role: Literal["system", "developer", "user"]
    """Who says it; `developer` is `system`."""


class ToolMessage(_Said):
    """What a tool answers."""

    model_config = _message(*_Said.empty)

    role: Literal["tool"]
    """Who says it; `developer` is `system`."""
    tool_call_id: Name
    """The call that the tool answers, of a message before."""


class PastFunction(Shape, extra="ignore"):
    """What was called."""

    name: Name
    """The name of one of the request's tools."""
    arguments: StrictStr
    """A JSON object, or as much of it as was written."""


class PastCall(Shape, extra="ignore"):
    """A call of a tool, as it came. Clients add fields to it."""

    id: Name
    """What the message with the tool's answer names."""
    type: Function = "function"
    function: PastFunction
    """Its name and its arguments."""


class AssistantMessage(Shape):
    """What the model answered."""

    model_config = _message(*NEVER, tool_call_id=_NO_CALL)
    empty = NEVER

    role: Literal["assistant"]
    """Who says it; `developer` is `system`."""
    content: StrictStr | Parts | None = None
    """The text."""
    name: Name | None = None
    """Who it is, for templates that say so."""
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    """The calls of tools in it, as they came."""
    reasoning_content: StrictStr | None = None
    """What the model wrote for itself, under either name; the chat template keeps it or drops it."""
    reasoning: StrictStr | None = None
    """What the model wrote for itself, under either name; the chat template keeps it or drops it."""
    parsed: Any = None
    """What a client has added to the message; not looked at."""
    provider_specific_fields: Any = None
    """What a client has added to the message; not looked at."""


Message = Annotated[TextMessage | ToolMessage | AssistantMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError(WRONG, _OF_OBJECT)
    return schema


_OF_OBJECT = "must be a JSON schema of an object"
Result = Annotated[dict[StrictStr, Any], Or("must be a JSON schema of what the function gives back")]


class DeclaredFunction(Shape):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(pattern=f"^{NAME.pattern}$"), Or("must be 1 to 64 letters, digits and _ . -")]
    """Its name, which no other tool has."""
    description: Annotated[StrictStr, Field(max_length=MAX_DESCRIPTION)] | None = None
    """What it does."""
    parameters: Annotated[dict[StrictStr, Any], AfterValidator(_of_object), Or(_OF_OBJECT)] | None = None
    """A JSON schema (draft 2020-12) of its arguments, which are an object."""
    strict: StrictBool | None = None
    """Arguments always obey the schema. Default: false."""
    response: Result | None = None
    """A schema of what it gives back, for templates."""
    result: Result | None = Field(None, alias="return")
    """A schema of what it gives back, for templates."""


class FunctionTool(Shape):
    """A tool."""

    type: Function
    function: DeclaredFunction
    """What may be called."""


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


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
    content: Any = message.content
    if isinstance(content, list):
        content = [vars(part) for part in content]  # as quick as nothing: its fields are what templates take
    role = message.role
    shown: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if message.name is not None:
        shown["name"] = message.name
    if message.role == "assistant":
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            shown["reasoning_content"] = reasoning
        if message.tool_calls:
            called.update(call.id for call in message.tool_calls)
            shown["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    elif message.role == "tool":
        if message.tool_call_id not in called:
            wanted = "must be the id of a call in an assistant's message before this one"
            raise wrong(f"messages[{index}].tool_call_id", wanted, message.tool_call_id)
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _call_for_template(call: PastCall) -> dict[str, Any]:
    """A call, its arguments as an object: templates write them out themselves."""
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def calling_of(tools: Any, choice: Any, parallel: bool | None, form: AnswerFormat) -> Calling:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises InvalidRequest."""
    if isinstance(tools, list):
        at_most("tools", tools, MAX_TOOLS, "tools")
    read = validated(_Toolbox, {"tools": tools, "tool_choice": choice}, exact=True, unknown=NotSupported)
    functions = [tool.function for tool in read.tools or ()]
    called = [
        Tool(each.name, _NO_PARAMETERS if each.parameters is None else each.parameters, bool(each.strict)) for each in functions
    ]
    named = read.tool_choice
    if isinstance(named, NamedTool):
        return calling(called, tools or [], "required", named.function.name, parallel is not False, form)
    return calling(called, tools or [], named or "auto", None, parallel is not False, form)


_NO_PARAMETERS = {"type": "object", "properties": {}}
