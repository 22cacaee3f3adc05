"""Messages and tools of a chat: shapes that validate them and document them in /openapi.json, and what templates get."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictStr, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import at_most, describe
from attend.service.chat.calls import MAX_NAME as MAX_TOOL_NAME
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME, arguments_of, check_count, wrong
from attend.service.chat.parts import Tool
from attend.service.chat.tools import MAX_DESCRIPTION, MAX_TOOLS, TOOL_NAME, Calling, Choice, calling
from attend.service.contract.shapes import NOT_SUPPORTED, WRONG, ByType, ErrorText, closed, open_to_more
from attend.service.remarks import Remarks

Name = Annotated[StrictStr, Field(max_length=MAX_NAME)]
TEXT_ALONE = "must be a text: this server takes no other input"
# --- parts of a message


@closed
class TextPart(TypedDict):
    """A text. What else clients send back of an answer's is left out."""

    type: Annotated[Literal["text", "input_text", "output_text"], ErrorText(TEXT_ALONE, NOT_SUPPORTED)]
    text: StrictStr
    annotations: NotRequired[Any]
    logprobs: NotRequired[Any]
    citations: NotRequired[Any]


@closed
class RefusalPart(TypedDict):
    """That a model, somewhere else, did not answer. It is left out."""

    type: Literal["refusal"]
    refusal: StrictStr


OpenAIMedia = Literal["image_url", "input_image", "input_audio", "input_video", "video_url", "input_file", "file"]
MEDIA = (*get_args(OpenAIMedia), "image", "document", "search_result", "container_upload")
"""Types of parts that are no text, in OpenAI's words and in Anthropic's."""


@open_to_more
class MediaPart(TypedDict):
    """Input that is no text: refused in what the user says last, else left out, and said."""

    type: OpenAIMedia


@open_to_more
class Other(TypedDict):
    """A tool, an item or a block that the model is not shown. That it is left out is said."""

    type: StrictStr


Part = Annotated[TextPart | RefusalPart | MediaPart, ByType("text")]
Content = StrictStr | Annotated[list[Part], Field(fail_fast=True)]
"""A text, or parts of it, joined by line ends where the chat template writes no parts."""


def refuse_media(messages: list[Any], name: str) -> None:
    """Raise NotSupported for media in what the user says last."""
    newest = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    content = messages[newest].get("content") if newest >= 0 else ""
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if part["type"] in MEDIA:
            where = f"{name}[{newest}].content[{at}].type"
            raise NotSupported(f"{where} {TEXT_ALONE}; got {describe(part['type'])}", where)


def without_media(parts: Iterable[Any], remarks: Remarks) -> list[Any]:
    """The parts, with a note to the model in place of each that is media; without refusals. What is left out is said."""
    made = []
    for part in parts:
        kind = part["type"]
        if kind in MEDIA:
            remarks.ignore(f"content.{kind}")
            part = {"type": "text", "text": f"[{kind} left out: this model reads text alone]"}
        if kind == "refusal":
            remarks.ignore(kind)
        else:
            made.append(part)
    return made


def text_parts(parts: list[Any]) -> str | list[dict[str, str]]:
    """Texts as templates take them: one, or several as parts, which templates join."""
    made = [{"type": "text", "text": part["text"]} for part in parts]
    return made[0]["text"] if len(made) == 1 else made or ""


# --- messages


@open_to_more
class PastFunction(TypedDict):
    """The function that was called."""

    name: Name
    arguments: StrictStr


@open_to_more
class PastCall(TypedDict):
    """A call of a tool, as it came. Clients add fields to it."""

    id: Name
    type: NotRequired[Literal["function"]]
    function: PastFunction


@closed
class Message(TypedDict):
    """A message of the conversation; `developer` is `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[Content | None]
    name: NotRequired[Name]
    tool_call_id: NotRequired[Name]
    tool_calls: NotRequired[Annotated[list[PastCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None]
    reasoning_content: NotRequired[StrictStr]
    """Of the assistant: what it wrote for itself. The chat template keeps it or drops it."""
    reasoning: NotRequired[StrictStr]
    refusal: NotRequired[Any]
    annotations: NotRequired[Any]
    parsed: NotRequired[Any]
    provider_specific_fields: NotRequired[Any]
    function_call: NotRequired[Any]
    audio: NotRequired[Any]


def counted(check: Callable[[list[Any]], None]) -> BeforeValidator:
    """A check of a list's length, in the words that gRPC has for it: there it comes before the list is read."""

    def validate(value: Any) -> Any:
        if isinstance(value, list):
            check(value)
        return value

    return BeforeValidator(validate)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), counted(check_count)]
_OF_ASSISTANT = ("tool_calls", "reasoning_content", "reasoning", "parsed", "provider_specific_fields")
_OF_NOBODY = ("function_call", "audio")


def messages_of(messages: list[Message], remarks: Remarks | None = None) -> list[dict[str, Any]]:
    """The messages as templates take them: a role, a text or its parts, what else was given. Raises InvalidRequest."""
    called: set[str] = set()
    remarks = remarks or Remarks(strict=True)
    refuse_media(messages, "messages")
    return [_for_template(message, f"messages[{index}]", called, remarks) for index, message in enumerate(messages)]


def _for_template(message: Message, place: str, called: set[str], remarks: Remarks) -> dict[str, Any]:
    """One message. `called` has the ids of the calls so far, and gets those of this message."""
    given: Any = message
    role = message["role"]
    for name in _OF_NOBODY if role == "assistant" else (*_OF_NOBODY, *_OF_ASSISTANT):
        if given.get(name):
            raise NotSupported(f"{place}.{name} is not supported in a message with this role", f"{place}.{name}")
    for name, needs in (("content", role != "assistant"), ("tool_call_id", role == "tool")):
        if needs and name not in message:
            raise InvalidRequest(f"{place}.{name} is required", f"{place}.{name}")
    shown: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(given, remarks)}
    shown |= {name: given[name] for name in ("name", "tool_call_id") if name in message}
    for name in ("reasoning", "reasoning_content"):
        if role == "assistant" and name in message:
            shown["reasoning_content"] = given[name]
    if calls := message.get("tool_calls"):
        called.update(call["id"] for call in calls)
        shown["tool_calls"] = [past_call(call["id"], **call["function"]) for call in calls]
    if "tool_call_id" in message:
        if role != "tool":
            raise InvalidRequest(f"{place}.tool_call_id is not a field of a message with this role", f"{place}.tool_call_id")
        check_called(message["tool_call_id"], called, f"{place}.tool_call_id", "a call in an assistant's message")
    return shown


def check_called(number: str, called: set[str], place: str, call: str) -> None:
    """Raise InvalidRequest for an answer to no call before it."""
    if number not in called:
        raise wrong(place, f"must be the id of {call} before this one", number)


def _content(message: Any, remarks: Remarks) -> str | list[Any]:
    """The text of a message, or its parts. What is left out is said."""
    content = message.get("content")
    for name in ("refusal", "annotations"):
        if message.get(name):
            remarks.ignore(name)
    if content == []:
        remarks.ignore("content")
    if not isinstance(content, list):
        return content or ""
    return [{"type": "text", "text": part["text"]} for part in without_media(content, remarks)] or ""


def past_call(number: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates take it, its arguments as an object: they write them out themselves."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


# --- tools


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError(WRONG, _OF_OBJECT)
    return schema


_OF_OBJECT = "must be a JSON schema of an object"
Result = Annotated[dict[StrictStr, Any], ErrorText("must be a JSON schema of what the function gives back")]
FunctionName = Annotated[
    StrictStr, Field(pattern=f"^{TOOL_NAME.pattern}$"), ErrorText(f"must be 1 to {MAX_TOOL_NAME} letters, digits and _ . -")
]
FunctionText = Annotated[StrictStr, Field(max_length=MAX_DESCRIPTION)]
FunctionSchema = Annotated[dict[StrictStr, Any], AfterValidator(_of_object), ErrorText(_OF_OBJECT)]


@closed
class DeclaredFunction(TypedDict("_Returning", {"return": NotRequired[Result]})):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[FunctionText]
    parameters: NotRequired[FunctionSchema]
    """A JSON schema of its arguments, which are an object: of draft 2020-12, 7 or 4 where calls are enforced."""
    strict: NotRequired[StrictBool]
    """Arguments always obey the schema. Default: false."""
    response: NotRequired[Result]


def _as_written(given: Any, read: ValidatorFunctionWrapHandler) -> dict[str, Any]:
    """What is known of an object, in the caller's order and with its nulls: templates write it so, and pydantic does not."""
    found = read(given)
    return {name: found.get(name) for name in given if name in found or (given[name] is None and name in _OF_FUNCTION)}


_OF_FUNCTION = DeclaredFunction.__required_keys__ | DeclaredFunction.__optional_keys__


@closed
class FunctionTool(TypedDict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Annotated[DeclaredFunction, WrapValidator(_as_written)]


AnyTool = Annotated[FunctionTool | Other, ByType("function"), WrapValidator(_as_written)]
Tools = Annotated[
    list[AnyTool],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    counted(lambda tools: at_most("tools", tools, MAX_TOOLS, "tools")),
]


@closed
class NamedFunction(TypedDict):
    """A function that may be called."""

    name: StrictStr


@closed
class NamedTool(TypedDict):
    """A tool that may be called: its name stands in `function` in chats, beside the type in responses."""

    type: Literal["function"]
    function: NotRequired[NamedFunction]
    name: NotRequired[StrictStr]


NamedTools = Annotated[
    list[Annotated[NamedTool | Other, ByType("function")]], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)
]


@closed
class Allowed(TypedDict):
    """A part of the tools, to which the choice is limited. The others are shown to the model too."""

    mode: Literal["auto", "required"]
    tools: NamedTools


@closed
class AllowedTools(TypedDict):
    """Only some of the tools may be called: in `allowed_tools` in chats, beside the type in responses."""

    type: Literal["allowed_tools"]
    allowed_tools: NotRequired[Allowed]
    mode: NotRequired[Literal["auto", "required"]]
    tools: NotRequired[NamedTools]


ToolChoice = Choice | Annotated[NamedTool | AllowedTools, ByType()]


def calling_of(
    tools: list[Any] | None,
    choice: Any,
    parallel: bool | None,
    form: AnswerFormat,
    remarks: Remarks,
    own: str = "function",
    schema: str = "function.parameters",
    name_place: str = "",
) -> Calling:
    """What tools, and a choice of them in OpenAI's words, ask for. `own` is the type of those that can be called, `schema`
    where the schema of their arguments stands, `name_place` where the name of a chosen one does, if not as in chats and
    responses. Raises InvalidRequest.
    """
    declared, documents = [], []
    for index, tool in enumerate(tools or ()):
        if not is_callable(tool, index, remarks, own):
            continue
        function = tool.get("function", tool)
        parameters = function.get(schema.rpartition(".")[2])
        strict = bool(function.get("strict"))
        shown = _NO_PARAMETERS if parameters is None else parameters
        declared.append(Tool(function["name"], shown, strict, f"tools[{index}].{schema}"))
        documents.append(tool if function is not tool else _template_tool(function, parameters))
    named: dict[str, str] | None = None
    if isinstance(choice, dict):
        within = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
        listed: Any = choice.get("allowed_tools", choice)
        for name in ("mode", "tools") if choice["type"] == "allowed_tools" else ():
            if name not in listed:
                raise InvalidRequest(f"{within}.{name} is required", f"{within}.{name}")
        places = [(f"{within}.tools[{at}]", tool) for at, tool in enumerate(listed.get("tools", ()))] or [(within, choice)]
        named = {}
        for place, tool in places:
            function = tool.get("function", tool)
            if tool["type"] == "function" and "name" not in function:
                missing = f"{place}.{'function.' * schema.startswith('function.')}name"
                raise InvalidRequest(f"{missing} is required", missing)
            if tool["type"] == "function":
                named.setdefault(function["name"], name_place or f"{place}{'.function' * (function is not tool)}.name")
        choice = listed.get("mode", "required")
    return calling(declared, documents, choice or "auto", named, parallel is not False, form)


def is_callable(tool: Any, index: int, remarks: Remarks, own: str = "function") -> bool:
    """True if a tool can be called: it is of the type `own`. That another one is left out is said, or an error by name."""
    kind = tool.get("type")
    if kind is None or kind == own:
        return True
    if remarks.strict:
        raise wrong(f"tools[{index}].type", f"must be '{own}'", kind)
    remarks.ignore(f"tools.{kind}")
    return False


def _template_tool(function: dict[str, Any], parameters: Any) -> dict[str, Any]:
    """A function as templates write it, whose caller writes it otherwise."""
    given = {"name": function["name"], "description": function.get("description"), "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
