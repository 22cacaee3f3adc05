"""OpenAI's chat: a request to a Command."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from attend.model.chat import ChatTemplate
from attend.model.errors import InvalidRequest, NotSupported
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.params import DEFAULT_PRIORITY, MAX_INT32, describe, integer
from attend.service.chat.forms import TEXT_ALONE, AnswerForm
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.prompt import EFFORTS, prompt_of
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.commands import decoding_of, sampling_of, stops_of
from attend.service.contract.conversation import Messages, ToolChoice, Tools, calling_of, messages_of
from attend.service.contract.mistakes import validated
from attend.service.contract.requests import Generation, ModelName, kind_of
from attend.service.contract.shapes import ShownAs, between, body, off, told
from attend.service.contract.structured import grammar_of
from attend.service.records import ChatPrompt, ChatRules, Command

MAX_TOP_LOGPROBS = 20
_REPLACED = "give tools and tool_choice in its place"
NOT_BUILT: dict[str, tuple[Any, str]] = {
    "functions": ([], _REPLACED),
    "function_call": ("none", _REPLACED),
    "store": (False, "no answer is kept"),
}
"""Fields that clients send and that are not carried out: what asks for nothing, beside null, and what is said of the rest."""


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions. Messages and tools are read by `conversation.py`."""

    model_config = body(**{name: off(f"Not supported: {instead}.", value) for name, (value, instead) in NOT_BUILT.items()})

    model: ModelName = told(minLength=1)
    max_tokens: StrictInt | None = told(**between(1, MAX_INT32))
    """The most tokens of an answer, under its older name. Absent means what the context has left."""
    messages: Annotated[list[Any], ShownAs(Messages)] = Field(
        description=f"The conversation, 1 to {MAX_MESSAGES} messages, written as a prompt by the checkpoint's chat template."
    )
    max_completion_tokens: StrictInt | None = told(**between(1, MAX_INT32))
    """The most tokens of an answer. Absent means what the context has left. Must equal `max_tokens` where both are given."""
    logprobs: StrictBool | None = told(False)
    """Report the log probability of each token."""
    top_logprobs: StrictInt | None = told(0, **between(0, MAX_TOP_LOGPROBS))
    """How many of the likeliest tokens to report in each place. Only where `logprobs` is true."""
    chat_template_kwargs: dict[StrictStr, Any] | None = None
    """What the chat template takes beside the messages. Default: nothing."""
    tools: Annotated[list[Any], ShownAs(Tools)] | None = told(
        description=f"Functions that the model may call: at most {MAX_TOOLS}, their schemas at most {MAX_SCHEMA_BYTES} bytes "
        "in all, 64 KiB where calls are enforced. Default: none."
    )
    tool_choice: Annotated[Any, ShownAs(ToolChoice | None)] = None
    """`none`: the tools are not shown to the model. `required`, or a function by its name: the answer is calls, whose arguments
    obey the schemas. Default: `auto`, the model decides; then only calls of `strict` tools are held to obey."""
    parallel_tool_calls: StrictBool | None = told(True)
    """An answer may hold more than one call."""
    reasoning_effort: Annotated[StrictStr, WithJsonSchema({"enum": list(EFFORTS)})] | None = None
    """How much the model is to reason, where its chat template knows such a thing. A template that can only leave reasoning out
    does so for `none`. Default: the template's."""


def read_chat(fields: dict[str, Any]) -> ChatRequest:
    """A parsed body as a ChatRequest. Raises InvalidRequest with the field named."""
    for name, value in fields.items():
        if not _asks_for_nothing(name, value):
            raise NotSupported(f"{name}: {NOT_BUILT[name][1]}; got {describe(value)}", name)
    fields = {name: value for name, value in fields.items() if name not in NOT_BUILT}
    if fields.get("messages") is None:
        raise InvalidRequest("messages is required: a list of objects with a role and a content", "messages")
    return validated(ChatRequest, fields)


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name not in NOT_BUILT or value is None:
        return True
    off = NOT_BUILT[name][0]
    return kind_of(value) is kind_of(off) and value == off


def to_command(
    body: ChatRequest,
    request_id: str,
    template: ChatTemplate,
    defaults: Defaults = NO_DEFAULTS,
    form: AnswerForm = TEXT_ALONE,
) -> Command:
    """What the body asks for. Its messages become a prompt when the call is prepared, and are checked then."""
    calling = calling_of(body.tools, body.tool_choice, body.parallel_tool_calls, form)
    given = body.chat_template_kwargs or {}

    def write() -> str:
        return prompt_of(template, messages_of(body.messages), calling, given, body.reasoning_effort)

    chat = ChatRules(form, calling)
    return Command(prompts=(ChatPrompt(write),), request_id=request_id, chat=chat, **command_arguments(body, defaults))


def command_arguments(body: ChatRequest, defaults: Defaults) -> dict[str, Any]:
    """All of a Command but its prompt and its id. Raises InvalidRequest with the field named."""
    if body.model == "":
        raise InvalidRequest("model must be the name of a model, or absent; got '' (string)", "model")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    return {
        "sampling": sampling_of(body, defaults),
        "stops": stops_of(body, max_tokens_of(body)),
        "decoding": decoding_of(body, defaults),
        "n": 1 if body.n is None else body.n,
        "model": body.model or "",
        "deadline_ms": body.deadline_ms,
        "skip_special_tokens": body.skip_special_tokens is not False,
        "logprobs": logprobs_of(body),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "priority": DEFAULT_PRIORITY if body.priority is None else body.priority,
        "cache_salt": body.cache_salt or "",
        "grammar": grammar_of(body.response_format, body.structured_outputs),
    }


def max_tokens_of(body: ChatRequest) -> int | None:
    """The longest answer, under either of its names; None for what the context has left."""
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) is not None:
            integer(name, getattr(body, name), 1, MAX_INT32)
    given = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(given) > 1:
        both = f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}"
        raise InvalidRequest(
            f"max_completion_tokens must equal max_tokens where both are given; {both}", "max_completion_tokens"
        )
    return next(iter(given), None)


def logprobs_of(body: ChatRequest) -> int | None:
    """Alternatives to report with each token; None where log probabilities are not asked for."""
    if body.top_logprobs is not None:
        integer("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
