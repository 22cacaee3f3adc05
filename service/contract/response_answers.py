"""The answers of OpenAI's Responses API, as `http_api/responses.py` writes them and /openapi.json shows them."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import (
    AnyText,
    ChatTokenLogprob,
    Count,
    Fingerprint,
    Id,
    ResponseUsage,
    Seconds,
    Seed,
    ServedModel,
)

ItemId = Annotated[str, Field(examples=["msg_8d3f_0"])]
Status = Literal["completed", "in_progress", "incomplete", "failed"]
Used = Annotated[float, Field(examples=[1.0])]


class OutputText(TypedDict):
    """A text of the answer. There are no citations."""

    type: Literal["output_text"]
    text: AnyText
    annotations: list[Any]
    logprobs: Iterable[ChatTokenLogprob]


class ReasoningPart(TypedDict):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """What the model says, in one text."""

    type: Literal["message"]
    id: ItemId
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(TypedDict):
    """A call of a tool. The item with the tool's answer names its `call_id`."""

    type: Literal["function_call"]
    id: ItemId
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputReasoning(TypedDict):
    """What the model wrote for itself. `encrypted_content` is base64, and no secret."""

    type: Literal["reasoning"]
    id: ItemId
    status: Status
    summary: list[Any]
    content: list[ReasoningPart]
    encrypted_content: str | None


OutputItem = OutputMessage | OutputCall | OutputReasoning


class Response(TypedDict):
    """The answer to a call, and what was asked for. Nothing is kept, so some fields are always null."""

    id: Id
    object: Literal["response"]
    created_at: Seconds
    completed_at: int | None
    status: Status
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    """OpenAI's `reason`, and in `finish_reason` what cut the answer: `length`, `deadline`, or `abort` at a shutdown."""
    model: ServedModel
    output: Annotated[list[OutputItem], Field(examples=[[]])]
    usage: ResponseUsage | None
    system_fingerprint: Fingerprint
    seed: NotRequired[Seed]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: Annotated[dict[str, str], Field(examples=[{}])]
    parallel_tool_calls: Annotated[bool, Field(examples=[True])]
    temperature: Used
    top_p: Used
    presence_penalty: Used
    frequency_penalty: Used
    top_logprobs: Count
    truncation: Literal["auto", "disabled"]
    tool_choice: Annotated[Any, Field(examples=["auto"])]
    tools: Annotated[list[Any], Field(examples=[[]])]
    text: Annotated[dict[str, Any], Field(examples=[{"format": {"type": "text"}}])]
    reasoning: Annotated[dict[str, Any], Field(examples=[{"effort": None}])]
    service_tier: Literal["default"]
    user: str | None
    safety_identifier: None
    prompt_cache_key: None


class ResponseEvent(TypedDict):
    """One event of a stream. Its name is its `type`; the others say what it is about, and all or what is new of that."""

    type: Annotated[str, Field(examples=["response.output_text.delta"])]
    sequence_number: Count
    response: NotRequired[Response]
    output_index: NotRequired[Annotated[Count, Field(examples=[0])]]
    item_id: NotRequired[ItemId]
    item: NotRequired[OutputItem]
    content_index: NotRequired[Annotated[Count, Field(examples=[0])]]
    part: NotRequired[OutputText | ReasoningPart]
    delta: NotRequired[AnyText]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[Iterable[ChatTokenLogprob]]
