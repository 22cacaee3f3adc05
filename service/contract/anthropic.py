"""Request bodies of Anthropic's Messages API, converted to a chat."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, StrictBool, StrictInt, StrictStr, Tag, WithJsonSchema
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import MAX_INT32, MAX_STOP_STRINGS, at_most
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.tools import MAX_TOOLS, Calling, calling
from attend.service.contract.anthropic_blocks import MessageParams, Texts
from attend.service.contract.conversation import (
    FunctionName,
    FunctionSchema,
    FunctionText,
    function_tool,
    is_callable,
    template_tool,
)
from attend.service.contract.requests import ModelName, Steering, StopTexts, Templated
from attend.service.contract.shapes import NullAsAbsent, Shape, ShownAs, between, body, closed, open_to_more, optional_field
from attend.service.contract.tolerance import SAMPLING, Off
from attend.service.contract.validation import read_body, validate
from attend.service.remarks import Remarks

THREAD = "thread"
"""A conversation that the server keeps."""
OFF: dict[str, Off] = {
    "mcp_servers": Off(([],), "no tools are called here: declare them in tools"),
    "stop": Off(([],), "use stop_sequences"),
    "max_completion_tokens": Off((), "use max_tokens"),
    "response_format": Off((), "use output_config.format"),
    "output_format": Off((), "use output_config.format"),
    "compaction": Off((), "summaries are not made here: shorten messages"),
    THREAD: Off((), "nothing is kept here: send the whole conversation in messages"),
    "reasoning_effort": Off((), "use output_config.effort"),
    "n": Off((1,), "a message has one answer"),
    "logprobs": Off((False,)),
    "top_logprobs": Off((0,)),
}
"""Fields that are not carried out here."""


@closed
class ToolParam(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    """Its name, which no other tool has."""
    description: NotRequired[FunctionText]
    """What it does."""
    input_schema: FunctionSchema
    """A JSON schema of its arguments, which are an object."""
    type: NotRequired[Literal["custom"] | None]
    """What kind of tool it is."""
    strict: NotRequired[StrictBool | None]
    """Arguments always obey the schema. Default: false."""


@open_to_more
class ServerTool(TypedDict):
    """A tool that runs elsewhere. It is not shown to the model."""

    type: Annotated[StrictStr, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]
    """What kind of tool it is."""


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "another tool" if isinstance(kind, str) and kind != "custom" else "a function"


AnyTool = Annotated[
    Annotated[ToolParam, NullAsAbsent(), Tag("a function")] | Annotated[ServerTool, Tag("another tool")],
    Discriminator(_kind_of_tool),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoice(Shape):
    """Which tools may be called."""

    type: Literal["auto", "any", "none", "tool"]
    """`any`: one has to be. `tool`: the one with this name."""
    name: StrictStr | None = None
    """The name of one of the tools."""
    disable_parallel_tool_use: StrictBool | None = None
    """An answer holds one call at most."""


class _Toolbox(Shape):
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


class Thinking(Shape):
    """True if the model is to reason; ignored, and said, where the chat template knows no such thing."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`adaptive`: as the chat template has it."""
    budget_tokens: StrictInt | None = optional_field(**between(0, MAX_INT32))
    """The most tokens of reasoning: then the reasoning ends, and the answer follows."""


class JsonOutput(Shape):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    """That the format is a JSON schema."""
    content: dict[StrictStr, Any] = Field(alias="schema")
    """The JSON schema. At most 64 KiB."""


class OutputConfig(Shape):
    """What the answer must look like."""

    effort: StrictStr | None = optional_field()
    """As `reasoning_effort` of a chat; ignored, and said, where the chat template knows no such thing."""
    format: JsonOutput | None = None
    """JSON that the answer must be. Default: any text."""


class CountTokensRequest(Templated):
    """The body of POST /v1/messages/count_tokens."""

    model_config = body("messages")

    model: ModelName = optional_field(minLength=1)
    system: Annotated[Any, ShownAs(Texts | None)] = optional_field()
    """What the model is told first."""
    messages: Annotated[Any, ShownAs(MessageParams)] = optional_field(
        description=f"The conversation, 1 to {MAX_MESSAGES} messages."
    )
    tools: Annotated[list[Any], ShownAs(Tools)] | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}. Other tools are left out, and said. "
        "Default: none."
    )
    tool_choice: Annotated[Any, ShownAs(ToolChoice | None)] = optional_field()
    """Which tools may be called. Default: all, and none has to be."""
    thinking: Thinking | None = optional_field()
    """True if the model is to reason. Default: as the chat template has it."""
    output_config: OutputConfig | None = optional_field()
    """What the answer must look like. Default: anything."""


class MessagesRequest(CountTokensRequest, Steering):
    """The body of POST /v1/messages."""

    model_config = body("messages", off=OFF)
    off = SAMPLING | OFF

    max_tokens: StrictInt | None = optional_field(**between(1, MAX_INT32))
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    stop_sequences: StopTexts | None = optional_field(
        description=f"Texts that end the answer: at most {MAX_STOP_STRINGS}. Default: none."
    )


def read_messages(document: dict[str, Any], remarks: Remarks) -> MessagesRequest:
    """A parsed body as a MessagesRequest. Raises InvalidRequest with the field named."""
    _need_messages(document)
    return read_body(MessagesRequest, document, remarks)


def read_count(document: dict[str, Any], remarks: Remarks) -> CountTokensRequest:
    """A parsed body as a CountTokensRequest. Raises InvalidRequest with the field named."""
    _need_messages(document)
    return read_body(CountTokensRequest, document, remarks)


def _need_messages(document: dict[str, Any]) -> None:
    if document.get("messages") is None:
        raise InvalidRequest("messages is required: a list of objects with a role and a content", "messages")


def calling_of_anthropic(request: CountTokensRequest, form: AnswerFormat, remarks: Remarks) -> Calling:
    """What the fields `tools` and `tool_choice` ask for. Raises InvalidRequest."""
    if request.tools is not None:
        at_most("tools", request.tools, MAX_TOOLS, "tools")
    given = {"tools": request.tools, "tool_choice": request.tool_choice}
    read = validate(_Toolbox, given, remarks, exact=True, unknown=NotSupported)
    functions: list[Any] = [(at, tool) for at, tool in enumerate(read.tools or ()) if is_callable(tool, at, remarks, "custom")]
    callable_ = [function_tool(tool["name"], tool["input_schema"], tool.get("strict"), at) for at, tool in functions]
    documents = [template_tool(tool["name"], tool.get("description"), tool["input_schema"]) for _, tool in functions]
    choice = read.tool_choice or ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice.name is required where its type is 'tool'", "tool_choice.name")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return calling(callable_, documents, "required", (choice.name or "",), parallel, form)
    chosen: dict[str, Any] = {"any": "required"}
    return calling(callable_, documents, chosen.get(choice.type, choice.type), None, parallel, form)
