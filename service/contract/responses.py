"""The request body of OpenAI's Responses API, which is stateless, and its items as messages of a chat."""

import base64
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest, NotSupported
from attend.service.chat.messages import MAX_MESSAGES, wrong
from attend.service.chat.tools import MAX_TOOLS
from attend.service.contract.conversation import (
    Content,
    FunctionName,
    FunctionSchema,
    FunctionText,
    Name,
    Other,
    ToolChoice,
    past_call,
    refuse_media,
    text_parts,
    without_media,
)
from attend.service.contract.requests import Alternatives, Positive, SamplingFields, Stop, TemplateFields
from attend.service.contract.shapes import ByType, Shape, closed, open_to_more, optional_field
from attend.service.contract.structured import NamedSchema, ObjectFormat, TextFormat
from attend.service.contract.tolerance import SAMPLING, Unsupported, use_instead
from attend.service.remarks import Remarks

SEALED = "attend1."
"""What reasoning that is given back as `encrypted_content` begins with. It is base64 of the text, and no secret."""


class _Item(TypedDict):
    """What clients send back with an item; not used."""

    id: NotRequired[Any]
    status: NotRequired[Any]
    phase: NotRequired[Any]
    namespace: NotRequired[Any]
    caller: NotRequired[Any]


@closed
class InputMessage(_Item):
    """A message of the conversation; `developer` is `system`."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: NotRequired[Literal["message"]]


@closed
class InputCall(_Item):
    """A call of a tool, as the model made it."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: StrictStr


@closed
class InputOutput(_Item):
    """What a tool answers to a call of an item before."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    name: NotRequired[Any]


@open_to_more
class ReasoningText(TypedDict):
    """A piece of reasoning."""

    text: StrictStr


@closed
class InputReasoning(_Item):
    """What the model wrote for itself. The chat template keeps it or drops it."""

    type: Literal["reasoning"]
    summary: NotRequired[list[ReasoningText]]
    content: NotRequired[list[ReasoningText]]
    encrypted_content: NotRequired[StrictStr]


Item = Annotated[InputMessage | InputCall | InputOutput | InputReasoning | Other, ByType("message")]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


_STATELESS = "nothing is kept here: send the whole conversation in input"
_UNSUPPORTED = use_instead(
    previous_response_id=_STATELESS,
    conversation=_STATELESS,
    prompt="prompts are not kept here: use instructions and input",
    max_tokens="use max_output_tokens",
    max_completion_tokens="use max_output_tokens",
    messages="use input",
    response_format="use text.format",
    reasoning_effort="use reasoning.effort",
) | {
    "background": Unsupported((False,), "a call ends with its answer"),
    "logprobs": Unsupported((False,), "use include: message.output_text.logprobs"),
    **dict.fromkeys(("n", "best_of"), Unsupported((1,), "a response has one answer")),
}
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


class ResponseSchemaFormat(NamedSchema):
    """An answer that fits a schema."""

    type: Literal["json_schema"]


class TextConfig(Shape):
    """What the answer's text must look like."""

    format: Annotated[TextFormat | ObjectFormat | ResponseSchemaFormat, ByType()] | None = None


class ReasoningConfig(Shape):
    """How much the model is to reason."""

    effort: StrictStr | None = None
    """As `reasoning_effort` of a chat; ignored, and said, where the chat template knows none."""


class ResponsesRequest(TemplateFields, SamplingFields):
    """The body of POST /v1/responses."""

    unsupported: ClassVar = SAMPLING | _UNSUPPORTED
    format_place: ClassVar = "text.format"

    input: StrictStr | Items = Field(
        description=f"The conversation: a text, which the user says, or 1 to {MAX_MESSAGES} items."
    )
    instructions: StrictStr | None = None
    """What the model is told first, as a system message."""
    max_output_tokens: Positive | None = None
    """The most tokens of the answer, reasoning among them. Default: what the context has left."""
    tools: Tools | None = optional_field(description=f"Functions that the model may call: at most {MAX_TOOLS}. Default: none.")
    tool_choice: ToolChoice | None = None
    """As `tool_choice` of a chat. Default: `auto`."""
    parallel_tool_calls: StrictBool | None = optional_field(True)
    """An answer may hold more than one call."""
    text: TextConfig | None = None
    """What the answer's text must look like."""
    reasoning: ReasoningConfig | None = None
    """How much the model is to reason."""
    truncation: Literal["auto", "disabled"] | None = optional_field("disabled")
    """`auto`: a conversation that is too long loses its oldest items, but for the system messages. Else it is an error."""
    include: list[StrictStr] | None = optional_field(
        description=f"What else the answer has: `{LOGPROBS}`, and `{ENCRYPTED}`, with which clients send reasoning back. Other "
        "names are ignored, and said."
    )
    top_logprobs: Alternatives | None = optional_field(0)
    """How many of the most likely tokens to report at each position. Above 0 log probabilities are reported."""
    stop: Stop | None = None
    """Texts that end the answer. Not of OpenAI's API."""
    store: StrictBool | None = None
    metadata: dict[StrictStr, StrictStr] | None = None

    @classmethod
    def read(cls, document: dict[str, Any], remarks: Remarks | None = None) -> Self:
        """As of every body. What is ignored of `include` and `store` is said."""
        remarks = remarks or Remarks(strict=True)
        request = super().read(document, remarks)
        for name in request.include or ():
            if name not in (LOGPROBS, ENCRYPTED):
                remarks.ignore(f"include.{name}")
        if request.store:
            remarks.ignore("store")
        return request

    @property
    def logprobs(self) -> int | None:
        """As of a completion."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)


def messages_of_input(instructions: str | None, items: str | list[Any], remarks: Remarks) -> list[dict[str, Any]]:
    """A conversation as templates take it. Raises InvalidRequest with the place named."""
    told_first: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*told_first, {"role": "user", "content": items}]
    refuse_media(items, "input")
    made = [*told_first]
    called: set[str] = set()
    for index, item in enumerate(items):
        _take(item, f"input[{index}]", made, called, remarks)
    if not made:
        raise InvalidRequest("input holds nothing that the model can be told", "input")
    return made


def _take(item: Any, place: str, made: list[dict[str, Any]], called: set[str], remarks: Remarks) -> None:
    """Take apart one item: reasoning, a text and calls that follow each other are one message of the assistant."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        if text := _reasoning(item, remarks):
            made.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind == "function_call":
        if not made or made[-1]["role"] != "assistant":
            made.append({"role": "assistant", "content": ""})
        called.add(item["call_id"])
        made[-1].setdefault("tool_calls", []).append(past_call(item["call_id"], item["name"], item["arguments"]))
    elif kind == "function_call_output":
        if item["call_id"] not in called:
            raise wrong(f"{place}.call_id", "must be the call_id of a function_call before this item", item["call_id"])
        made.append({"role": "tool", "content": _text(item["output"], remarks), "tool_call_id": item["call_id"]})
    elif kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        last = made[-1] if made and role == "assistant" else None
        if last is None or last["role"] != role or last["content"] or "tool_calls" in last:
            made.append({"role": role})
        made[-1]["content"] = _text(item["content"], remarks)
    elif kind == "item_reference":
        raise NotSupported(f"{place}.type: items are not kept here; send the item itself", f"{place}.type")
    else:
        remarks.ignore(f"input.{kind}")


def _reasoning(item: Any, remarks: Remarks) -> str:
    sealed, given = unseal(item.get("encrypted_content")), item.get("content")
    if item.get("encrypted_content") and sealed is None:
        remarks.ignore("encrypted_content")
    if given or sealed is None:
        return "".join(piece["text"] for piece in given or item.get("summary") or ())
    return sealed


def _text(content: Any, remarks: Remarks) -> str | list[dict[str, str]]:
    """A text, or its parts as templates take them."""
    return content if isinstance(content, str) else text_parts(without_media(content, remarks))


def seal(text: str) -> str:
    """Reasoning as `encrypted_content`, which clients send back as it is."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(content: str | None) -> str | None:
    """The inverse of `seal`; None for what is not ours."""
    if content and content.startswith(SEALED):
        with suppress(ValueError):
            return base64.b64decode(content.removeprefix(SEALED), validate=True).decode()
    return None
