"""The request body of OpenAI's Responses API. It is stateless: nothing is kept between calls."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.tools import MAX_TOOLS, Choice
from attend.service.contract.conversation import FunctionName, FunctionSchema, FunctionText, Other
from attend.service.contract.requests import Alternatives, ModelName, Positive, Steering, Stop, Templated
from attend.service.contract.response_items import Items
from attend.service.contract.shapes import ByType, Shape, body, closed, open_to_more, optional_field
from attend.service.contract.structured import NamedSchema, ObjectFormat, TextFormat
from attend.service.contract.tolerance import SAMPLING, Unsupported
from attend.service.contract.validation import read_body
from attend.service.remarks import Remarks

_STATELESS = "nothing is kept here: send the whole conversation in input"
OFF: dict[str, Unsupported] = {
    "previous_response_id": Unsupported((), _STATELESS),
    "conversation": Unsupported((), _STATELESS),
    "prompt": Unsupported((), "prompts are not kept here: use instructions and input"),
    "background": Unsupported((False,), "a call ends with its answer"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Unsupported((), "use max_output_tokens")),
    "messages": Unsupported((), "use input"),
    "response_format": Unsupported((), "use text.format"),
    "reasoning_effort": Unsupported((), "use reasoning.effort"),
    "logprobs": Unsupported((False,), "use include: message.output_text.logprobs"),
    **dict.fromkeys(("n", "best_of"), Unsupported((1,), "a response has one answer")),
}
"""Fields that are not carried out here."""
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What `include` may name, of what a text model has."""


@closed
class ResponseTool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: NotRequired[FunctionText]
    parameters: NotRequired[FunctionSchema]
    strict: NotRequired[StrictBool]


Tools = Annotated[list[Annotated[ResponseTool | Other, ByType("function")]], Field(max_length=MAX_TOOLS, fail_fast=True)]


@closed
class NamedResponseTool(TypedDict):
    """The only tool that may be called, and has to be."""

    type: Literal["function"]
    name: StrictStr


@open_to_more
class AllowedTool(TypedDict):
    """One of the tools; those that are no functions are left out."""

    type: StrictStr
    name: NotRequired[StrictStr]


@closed
class AllowedResponseTools(TypedDict):
    """Only some of the tools may be called. The others are shown to the model, so that the prompt stays the same."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ResponseSchemaFormat(NamedSchema):
    """An answer that fits a schema."""

    type: Literal["json_schema"]


class TextConfig(Shape):
    """What the answer's text must look like."""

    format: Annotated[TextFormat | ObjectFormat | ResponseSchemaFormat, ByType()] | None = None
    """JSON that the text must be. Default: any text."""


class ReasoningConfig(Shape):
    """How much the model is to reason."""

    effort: StrictStr | None = optional_field()
    """As `reasoning_effort` of a chat; ignored, and said, where the chat template knows no such thing."""


class ResponsesRequest(Templated, Steering):
    """The body of POST /v1/responses."""

    model_config = body(off=OFF)
    off = SAMPLING | OFF

    model: ModelName = optional_field(minLength=1)
    input: StrictStr | Items = Field(
        description=f"The conversation: a text, which the user says, or 1 to {MAX_MESSAGES} items."
    )
    instructions: StrictStr | None = optional_field()
    """What the model is told first, as a system message."""
    max_output_tokens: Positive | None = optional_field()
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    tools: Tools | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}. Other tools are left out, and said. "
        "Default: none."
    )
    tool_choice: Choice | Annotated[NamedResponseTool | AllowedResponseTools, ByType()] | None = optional_field()
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
    top_logprobs: Alternatives | None = optional_field(0)
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
    request = read_body(ResponsesRequest, document, remarks)
    for name in request.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            remarks.ignore(f"include.{name}")
    if request.store:
        remarks.ignore("store")
    return request
