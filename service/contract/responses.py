"""The request body of OpenAI's Responses API. It is stateless: nothing is kept between calls."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, StrictBool, StrictInt, StrictStr, Tag
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import MAX_INT32, MAX_LOGPROBS, at_most
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.tools import MAX_TOOLS, Calling, Choice, calling
from attend.service.contract.conversation import (
    FunctionName,
    FunctionSchema,
    FunctionText,
    NamedFunction,
    OtherTool,
    function_tool,
    is_callable,
    template_tool,
)
from attend.service.contract.requests import ModelName, Steering, Stop, Templated
from attend.service.contract.response_items import Items
from attend.service.contract.shapes import NullAsAbsent, Shape, ShownAs, between, body, closed, open_to_more, optional_field
from attend.service.contract.structured import JsonSchema, ObjectFormat, TextFormat
from attend.service.contract.tolerance import SAMPLING, Off
from attend.service.contract.validation import read_body, validate
from attend.service.remarks import Remarks

_STATELESS = "nothing is kept here: send the whole conversation in input"
OFF: dict[str, Off] = {
    "previous_response_id": Off((), _STATELESS),
    "conversation": Off((), _STATELESS),
    "prompt": Off((), "prompts are not kept here: use instructions and input"),
    "background": Off((False,), "a call ends with its answer"),
    "max_tokens": Off((), "use max_output_tokens"),
    "max_completion_tokens": Off((), "use max_output_tokens"),
    "messages": Off((), "use input"),
    "response_format": Off((), "use text.format"),
    "reasoning_effort": Off((), "use reasoning.effort"),
    "logprobs": Off((False,), "use include: message.output_text.logprobs"),
    "n": Off((1,), "a response has one answer"),
    "best_of": Off((1,), "a response has one answer"),
}
"""Fields that are not carried out here."""
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What `include` may name, of what a text model has."""
# --- tools


@closed
class ResponseTool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    """What kind of tool it is."""
    name: FunctionName
    """Its name, which no other tool has."""
    description: NotRequired[FunctionText]
    """What the function does, for the model."""
    parameters: NotRequired[FunctionSchema]
    """A JSON schema of its arguments, which are an object."""
    strict: NotRequired[StrictBool | None]
    """Arguments always obey the schema. Default: false."""


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "another tool" if isinstance(kind, str) and kind != "function" else "a function"


AnyTool = Annotated[
    Annotated[ResponseTool, NullAsAbsent(), Tag("a function")] | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_kind_of_tool),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedTool(NamedFunction):
    """The only tool that may be called, and has to be."""

    type: Literal["function"]
    """The choice is a function by its name."""


@open_to_more
class AllowedTool(TypedDict):
    """One of the tools; those that are no functions are left out."""

    type: StrictStr
    """What kind of tool it is."""
    name: NotRequired[StrictStr]
    """Name of the tool."""


class AllowedTools(Shape):
    """Only some of the tools may be called. The others are shown to the model, so that the prompt stays the same."""

    type: Literal["allowed_tools"]
    """The choice is limited to a part of the tools."""
    mode: Literal["auto", "required"]
    """True if one has to be called."""
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
    """The tools that may be called."""


ToolChoice = Choice | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


class _Toolbox(Shape):
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


# --- the body


class SchemaFormat(Shape):
    """An answer that fits a schema."""

    type: Literal["json_schema"]
    """That the format is a JSON schema."""
    content: JsonSchema = Field(alias="schema")
    """A JSON schema. At most 64 KiB."""
    name: StrictStr | None = None
    """Taken, and not used."""
    strict: StrictBool | None = None
    """Not used: answers always fit."""
    description: StrictStr | None = None
    """Taken, and not used."""


class TextConfig(Shape):
    """What the answer's text must look like."""

    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    """JSON that the text must be. Default: any text."""


class ReasoningConfig(Shape):
    """How much the model is to reason."""

    effort: StrictStr | None = optional_field()
    """As `reasoning_effort` of a chat; ignored, and said, where the chat template knows no such thing."""


class ResponsesRequest(Templated, Steering):
    """The body of POST /v1/responses."""

    model_config = body("input", off=OFF)
    off = SAMPLING | OFF

    model: ModelName = optional_field(minLength=1)
    input: Annotated[Any, ShownAs(StrictStr | Items)] = optional_field(
        description=f"The conversation: a text, which the user says, or 1 to {MAX_MESSAGES} items."
    )
    instructions: StrictStr | None = optional_field()
    """What the model is told first, as a system message."""
    max_output_tokens: StrictInt | None = optional_field(**between(1, MAX_INT32))
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    tools: Annotated[list[Any], ShownAs(Tools)] | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}. Other tools are left out, and said. "
        "Default: none."
    )
    tool_choice: Annotated[Any, ShownAs(ToolChoice | None)] = optional_field()
    """As `tool_choice` of a chat. Default: `auto`."""
    parallel_tool_calls: StrictBool | None = optional_field(True)
    """An answer may hold more than one call."""
    text: TextConfig | None = optional_field()
    """What the answer's text must look like."""
    reasoning: ReasoningConfig | None = optional_field()
    """How much the model is to reason."""
    truncation: Literal["auto", "disabled"] | None = optional_field("disabled")
    """`auto`: a conversation that is too long loses its oldest items, but for the system messages. Else it is an error."""
    include: list[StrictStr] | None = optional_field(
        description=f"What else the answer has: `{LOGPROBS}`, and `{ENCRYPTED}`, with which clients send reasoning back. Other "
        "names are ignored, and said."
    )
    top_logprobs: StrictInt | None = optional_field(0, **between(0, MAX_LOGPROBS))
    """How many of the most likely tokens to report at each position. Above 0 log probabilities are reported."""
    stop: Stop | None = optional_field()
    """Texts that end the answer. Not of OpenAI's API."""
    store: StrictBool | None = optional_field()
    """Taken, and nothing is kept: the answer says false."""
    metadata: dict[StrictStr, StrictStr] | None = optional_field()
    """Comes back with the answer; not used."""

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to report with each token; None where log probabilities are not asked for."""
        asked = self.top_logprobs or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None


def read_response(document: dict[str, Any], remarks: Remarks) -> ResponsesRequest:
    """A parsed body as a ResponsesRequest. Raises InvalidRequest with the field named."""
    if document.get("input") is None:
        raise InvalidRequest("input is required: a text, or a list of items", "input")
    request = read_body(ResponsesRequest, document, remarks)
    for name in request.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            remarks.ignore(f"include.{name}")
    if request.store:
        remarks.ignore("store")
    return request


def calling_of_response(request: ResponsesRequest, form: AnswerFormat, remarks: Remarks) -> Calling:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises InvalidRequest."""
    if request.tools is not None:
        at_most("tools", request.tools, MAX_TOOLS, "tools")
    given = {"tools": request.tools, "tool_choice": request.tool_choice}
    read = validate(_Toolbox, given, remarks, exact=True, unknown=NotSupported)
    functions: list[Any] = [(at, tool) for at, tool in enumerate(read.tools or ()) if is_callable(tool, at, remarks)]
    callable_ = [function_tool(tool["name"], tool.get("parameters"), tool.get("strict"), at) for at, tool in functions]
    documents = [template_tool(tool["name"], tool.get("description"), tool.get("parameters")) for _, tool in functions]
    parallel = request.parallel_tool_calls is not False
    match read.tool_choice:
        case NamedTool(name=name):
            return calling(callable_, documents, "required", (name,), parallel, form)
        case AllowedTools(mode=mode, tools=tools):
            names = tuple(tool["name"] for tool in tools if tool["type"] == "function" and "name" in tool)
            return calling(callable_, documents, mode, names, parallel, form)
        case choice:
            return calling(callable_, documents, choice or "auto", None, parallel, form)
