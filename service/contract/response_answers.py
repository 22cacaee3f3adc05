"""The answers of OpenAI's Responses API, as `http_api/responses.py` writes them and /openapi.json shows them."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from attend.service.contract.answers import Count, Logprob, record

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemId = Annotated[str, Field(description="The item's id.", examples=["msg_8d3f_0"])]
ItemStatus = Annotated[Status, Field(description="`incomplete` where the answer was cut in it.", examples=["completed"])]


@record
class ResponseTopLogprob(TypedDict):
    """A token that was likely."""

    token: str
    """The token alone as text."""
    bytes: list[int]
    """The token's bytes in UTF-8."""
    logprob: Logprob


@record
class ResponseLogprob(TypedDict):
    """A token of the text."""

    token: str
    """The token alone as text."""
    bytes: list[int]
    """The token's bytes in UTF-8."""
    logprob: Logprob
    top_logprobs: list[ResponseTopLogprob]
    """The most likely tokens in its place."""


@record
class OutputText(TypedDict):
    """A text of the answer."""

    type: Literal["output_text"]
    """What kind of part it is."""
    text: Annotated[str, Field(examples=["Hello!"])]
    """What the model says."""
    annotations: list[Any]
    """Always empty: there are no citations."""
    logprobs: Iterable[ResponseLogprob]
    """Empty where log probabilities are not asked for."""


@record
class ReasoningPart(TypedDict):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    """What kind of part it is."""
    text: str
    """What the model wrote for itself."""


@record
class OutputMessage(TypedDict):
    """What the model says."""

    type: Literal["message"]
    """What the item is."""
    id: ItemId
    status: ItemStatus
    role: Literal["assistant"]
    """Who says it."""
    content: list[OutputText]
    """The answer, in one text."""


@record
class OutputCall(TypedDict):
    """A call of a tool."""

    type: Literal["function_call"]
    """What the item is."""
    id: ItemId
    status: ItemStatus
    call_id: str
    """What the item with the tool's answer names."""
    name: str
    """The name of the tool."""
    arguments: str
    """A JSON object, or as much of it as was written."""


@record
class OutputReasoning(TypedDict):
    """What the model wrote for itself."""

    type: Literal["reasoning"]
    """What the item is."""
    id: ItemId
    status: ItemStatus
    summary: list[Any]
    """Always empty: reasoning is not summarised."""
    content: list[ReasoningPart]
    """The reasoning, in one text."""
    encrypted_content: str | None
    """Where `include` asks for it, the text in base64: it is no secret."""


OutputItem = OutputMessage | OutputCall | OutputReasoning


@record
class InputDetails(TypedDict):
    """More about the tokens of the prompt."""

    cached_tokens: Count
    """Tokens found in the prefix cache."""
    cache_write_tokens: Count
    """Always 0: nothing is charged for the prefix cache."""


@record
class OutputDetails(TypedDict):
    """More about the tokens of the answer."""

    reasoning_tokens: Count
    """Tokens of reasoning."""


@record
class ResponseUsage(TypedDict):
    """Tokens of the call."""

    input_tokens: Annotated[Count, Field(examples=[3])]
    """Tokens of the prompt."""
    input_tokens_details: InputDetails
    """What else is known of them."""
    output_tokens: Annotated[Count, Field(examples=[2])]
    """Tokens of the answer."""
    output_tokens_details: OutputDetails
    """What else is known of them."""
    total_tokens: Annotated[Count, Field(examples=[5])]
    """All tokens of the call."""


@record
class Incomplete(TypedDict):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]
    """OpenAI's word: the answer was cut."""
    finish_reason: str
    """What cut it: `length`, `deadline`, or `abort` at a shutdown."""


@record
class ResponseError(TypedDict):
    """What went wrong."""

    code: str
    """The error's name."""
    message: str
    """A sentence for a person."""


@record
class Response(TypedDict):
    """An answer. What is not described is the request's, or null."""

    id: Annotated[str, Field(description="The request's id, with a prefix that tells the route.", examples=["resp_8d3f"])]
    object: Annotated[Literal["response"], Field(description="What this is.")]
    created_at: Annotated[int, Field(description="When the call began, in seconds since 1970.", examples=[1767225600])]
    completed_at: Annotated[int | None, Field(description="When the answer was complete.", examples=[None])]
    status: Annotated[Status, Field(description="How far the answer is.", examples=["completed"])]
    error: Annotated[ResponseError | None, Field(description="Where `status` is `failed`: what went wrong.", examples=[None])]
    incomplete_details: Annotated[Incomplete | None, Field(description="Where `status` is `incomplete`: why.", examples=[None])]
    model: Annotated[str, Field(description="The model's name, as the request has it.", examples=["attend"])]
    output: Annotated[list[OutputItem], Field(description="The answer: reasoning, messages and calls of tools.", examples=[[]])]
    usage: Annotated[
        ResponseUsage | None, Field(description="What the call took; null until the answer has ended.", examples=[None])
    ]
    system_fingerprint: Annotated[str, Field(description="As that of a completion.", examples=["fp_5f0c1d2e3a4b"])]
    seed: NotRequired[Annotated[int, Field(description="With which the answer can be generated again.", examples=[229101])]]
    store: Annotated[Literal[False], Field(description="Nothing is kept.")]
    background: Annotated[Literal[False], Field(description="A call ends with its answer.")]
    previous_response_id: Annotated[None, Field(description="Nothing is kept.", examples=[None])]
    instructions: Annotated[str | None, Field(description="The request's.", examples=[None])]
    max_output_tokens: Annotated[int | None, Field(description="The request's.", examples=[None])]
    max_tool_calls: Annotated[None, Field(description="No tools are called here.", examples=[None])]
    metadata: Annotated[dict[str, str], Field(description="The request's.", examples=[{}])]
    parallel_tool_calls: Annotated[bool, Field(description="The request's.", examples=[True])]
    temperature: Annotated[float, Field(description="What was used.", examples=[1.0])]
    top_p: Annotated[float, Field(description="What was used.", examples=[1.0])]
    presence_penalty: Annotated[float, Field(description="What was used.", examples=[0.0])]
    frequency_penalty: Annotated[float, Field(description="What was used.", examples=[0.0])]
    top_logprobs: Annotated[int, Field(description="The request's.", examples=[0])]
    truncation: Annotated[Literal["auto", "disabled"], Field(description="The request's.")]
    tool_choice: Annotated[Any, Field(description="The request's.", examples=["auto"])]
    tools: Annotated[list[Any], Field(description="The functions of the request.", examples=[[]])]
    text: Annotated[dict[str, Any], Field(description="The request's.", examples=[{"format": {"type": "text"}}])]
    reasoning: Annotated[dict[str, Any], Field(description="The request's.", examples=[{"effort": None}])]
    service_tier: Annotated[Literal["default"], Field(description="There is one.")]
    user: Annotated[str | None, Field(description="The request's.", examples=[None])]
    safety_identifier: Annotated[None, Field(description="Not kept.", examples=[None])]
    prompt_cache_key: Annotated[None, Field(description="Not kept.", examples=[None])]


@record
class ResponseEvent(TypedDict):
    """One event of a stream. Its name is its `type`."""

    type: Annotated[
        Literal[
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
        Field(description="What happened.", examples=["response.output_text.delta"]),
    ]
    sequence_number: Annotated[Count, Field(description="How many events came before.", examples=[4])]
    response: NotRequired[Annotated[Response, Field(description="The answer so far, or all of it.")]]
    output_index: NotRequired[Annotated[Count, Field(description="Which item of `output` it is about.", examples=[0])]]
    item_id: NotRequired[Annotated[str, Field(description="The id of that item.", examples=["msg_8d3f_0"])]]
    item: NotRequired[Annotated[OutputItem, Field(description="That item so far, or all of it.")]]
    content_index: NotRequired[Annotated[Count, Field(description="Which part of the item it is about.", examples=[0])]]
    part: NotRequired[Annotated[OutputText | ReasoningPart, Field(description="That part so far, or all of it.")]]
    delta: NotRequired[Annotated[str, Field(description="What is new.", examples=["Hello"])]]
    text: NotRequired[Annotated[str, Field(description="All of the part.")]]
    name: NotRequired[Annotated[str, Field(description="The name of the tool that is called.")]]
    arguments: NotRequired[Annotated[str, Field(description="All arguments of the call.")]]
    logprobs: NotRequired[Annotated[Iterable[ResponseLogprob], Field(description="Of the tokens that are new, or of all.")]]
