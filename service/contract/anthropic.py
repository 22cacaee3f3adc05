"""Request bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.model.params import MAX_STOP_STRINGS
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.tools import MAX_TOOLS
from attend.service.contract.anthropic_blocks import MessageParams, Texts
from attend.service.contract.conversation import FunctionName, FunctionSchema, FunctionText, Other
from attend.service.contract.requests import ModelName, NotNegative, Positive, Steering, StopTexts, Templated
from attend.service.contract.shapes import ByType, Shape, body, closed, optional_field
from attend.service.contract.tolerance import SAMPLING, Unsupported
from attend.service.contract.validation import read_body
from attend.service.remarks import Remarks

THREAD = "thread"
"""A conversation that the server keeps."""
OFF: dict[str, Unsupported] = {
    "mcp_servers": Unsupported(([],), "no tools are called here: declare them in tools"),
    "stop": Unsupported(([],), "use stop_sequences"),
    "max_completion_tokens": Unsupported((), "use max_tokens"),
    **dict.fromkeys(("response_format", "output_format"), Unsupported((), "use output_config.format")),
    "compaction": Unsupported((), "summaries are not made here: shorten messages"),
    THREAD: Unsupported((), "nothing is kept here: send the whole conversation in messages"),
    "reasoning_effort": Unsupported((), "use output_config.effort"),
    "n": Unsupported((1,), "a message has one answer"),
    "logprobs": Unsupported((False,)),
    "top_logprobs": Unsupported((0,)),
}
"""Fields that are not carried out here."""


@closed
class ToolParam(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[FunctionText]
    input_schema: FunctionSchema
    type: NotRequired[Literal["custom"]]
    strict: NotRequired[StrictBool]


Tools = Annotated[list[Annotated[ToolParam | Other, ByType("custom")]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolUseChoice(Shape):
    """Which tools may be called."""

    type: Literal["auto", "any", "none", "tool"]
    """`any`: one has to be. `tool`: the one with this name."""
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None
    """An answer holds one call at most."""


class Thinking(Shape):
    """True if the model is to reason; ignored, and said, where the chat template knows no such thing."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`adaptive`: as the chat template has it."""
    budget_tokens: NotNegative | None = optional_field()
    """The most tokens of reasoning: then the reasoning ends, and the answer follows."""


class JsonOutput(Shape):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
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

    model: ModelName = optional_field(minLength=1)
    system: Texts | None = optional_field()
    """What the model is told first."""
    messages: MessageParams = Field(description=f"The conversation, 1 to {MAX_MESSAGES} messages.")
    tools: Tools | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}. Other tools are left out, and said. "
        "Default: none."
    )
    tool_choice: ToolUseChoice | None = optional_field()
    """Which tools may be called. Default: all, and none has to be."""
    thinking: Thinking | None = optional_field()
    """True if the model is to reason. Default: as the chat template has it."""
    output_config: OutputConfig | None = optional_field()
    """What the answer must look like. Default: anything."""


class MessagesRequest(CountTokensRequest, Steering):
    """The body of POST /v1/messages."""

    model_config = body(off=OFF)
    off = SAMPLING | OFF

    max_tokens: Positive | None = optional_field()
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    stop_sequences: StopTexts | None = optional_field(
        description=f"Texts that end the answer: at most {MAX_STOP_STRINGS}. Default: none."
    )


def read_messages(document: dict[str, Any], remarks: Remarks) -> MessagesRequest:
    """A parsed body as a MessagesRequest. Raises InvalidRequest with the field named."""
    return read_body(MessagesRequest, document, remarks)


def read_count(document: dict[str, Any], remarks: Remarks) -> CountTokensRequest:
    """A parsed body as a CountTokensRequest. Raises InvalidRequest with the field named."""
    return read_body(CountTokensRequest, document, remarks)
