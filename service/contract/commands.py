"""From a request body to a Command, the same for both transports."""

import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import fields
from typing import Any, TypeVar

from attend.model.errors import InvalidRequest
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.params import (
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    NO_CHANGE,
    DecodingParams,
    SamplingParams,
    StopRules,
    at_most,
    integer,
)
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.chat.prompt import known_effort, prompt_of, thinking_of, without_oldest
from attend.service.chat.tools import Calling
from attend.service.contract.anthropic import CountTokensRequest, MessagesRequest, calling_of_anthropic
from attend.service.contract.anthropic_blocks import messages_of_anthropic
from attend.service.contract.chat import ChatRequest
from attend.service.contract.conversation import calling_of, messages_of
from attend.service.contract.requests import (
    MAX_COMPLETION_LOGPROBS,
    CompletionRequest,
    Continuation,
    Generation,
    Scored,
    Steering,
    bias_tokens,
)
from attend.service.contract.response_items import messages_of_input
from attend.service.contract.responses import ResponsesRequest, calling_of_response
from attend.service.contract.shapes import Shape
from attend.service.contract.structured import KINDS, SchemaFormat, grammar_of, schema_of, spec_of
from attend.service.contract.texts import AttentionRequest, EmbeddingsRequest
from attend.service.records import ChatPrompt, ChatRules, Command, ExplainCommand, Prompt
from attend.service.remarks import Remarks

C = TypeVar("C")

INPUT = "a string, a list of strings, token ids, or a list of token-id lists"
TAKEN: dict[str, Callable[[Any], Any]] = {
    "stop": lambda value: (value,) if isinstance(value, str) else tuple(value),
    "logit_bias": bias_tokens,
}
"""How the values of some fields are written in records; those that are lists become tuples."""

NAMES: dict[type[Any], frozenset[str]] = {
    kind: frozenset(field.name for field in fields(kind))
    for kind in (Command, ExplainCommand, SamplingParams, StopRules, DecodingParams)
}
"""The fields of each record that a body fills."""

_FUNCTION = {r"\b(tools\[\d+\]|tool_choice)\.function\b": r"\1"}
_OWN_NAMES: dict[type[Shape], dict[str, str]] = {
    ResponsesRequest: {**_FUNCTION, r"\bmax_tokens\b": "max_output_tokens", r"\breasoning_effort\b": "reasoning.effort"},
    CountTokensRequest: {
        r"\b(tools\[\d+\])\.function\.parameters\b": r"\1.input_schema",
        **_FUNCTION,
        r"\btool_choice: 'required'": "tool_choice: 'any'",
        r"^stop\b": "stop_sequences",
        r"\breasoning_effort\b": "output_config.effort",
    },
}
"""How an API calls the fields of a chat that errors name."""
_FORMAT = r"^json_schema\b"
"""How errors call a schema in a format."""


def to_command(
    body: Steering,
    request_id: str,
    defaults: Defaults = NO_DEFAULTS,
    template: ChatTemplate | None = None,
    form: AnswerFormat = TEXT_ALONE,
    remarks: Remarks | None = None,
) -> Command:
    """What the body asks for. Its own id goes before `request_id`; `defaults` are for what it leaves out.

    A conversation needs its model's `template` and the `form` of its answers. Its messages become a prompt when the call is
    prepared, and are checked then. Raises InvalidRequest with the field named.
    """
    remarks = Remarks(strict=True) if remarks is None else remarks
    with own_names(body):
        own: dict[str, Any] = {"grammar": grammar_of(getattr(body, "response_format", None), body.structured_outputs)}
        if isinstance(body, Continuation):
            own |= _of_continuation(body)
        else:
            assert template is not None, "callers refuse a conversation where there is no template"
            own |= conversation_of(body, template, form, remarks)
        limits: dict[str, Any] = {name: own.pop(name) for name in ("max_tokens", "stop") if name in own}
        return Command(
            **fields_of(body, Command) | own | {"request_id": body.request_id or request_id},
            sampling=SamplingParams(**{**defaults.sampling, **fields_of(body, SamplingParams)}),
            stops=StopRules(**fields_of(body, StopRules) | limits),
            decoding=_decoding(body, defaults),
            remarks=remarks,
        )


@contextmanager
def own_names(body: Shape) -> Iterator[None]:
    """Errors that are raised meanwhile have the names that the body's API has for its fields."""
    try:
        yield
    except InvalidRequest as error:
        message, place = str(error), error.field
        for pattern, name in _names_of(body).items():
            message = re.sub(pattern, name, message)
            place = place and re.sub(pattern, name, place)
        if message == str(error):
            raise
        renamed = copy(error)
        renamed.args, renamed.field = (message,), place
        raise renamed from error


def _names_of(body: Shape) -> dict[str, str]:
    """The names that a body's API has for fields, by the patterns of what errors call them."""
    names = dict(next((names for kind, names in _OWN_NAMES.items() if isinstance(body, kind)), {}))
    if isinstance(body, CountTokensRequest):
        if body.thinking_token_budget is None:
            names[r"\bthinking_token_budget\b"] = "thinking.budget_tokens"
        if body.output_config is not None and body.output_config.format is not None:
            names[_FORMAT] = "output_config.format.schema"
    if isinstance(body, ResponsesRequest) and body.text is not None and body.text.format is not None:
        names[_FORMAT] = "text.format.schema"
    if isinstance(body, Generation) and body.response_format is not None:
        named = isinstance(body.response_format, SchemaFormat)
        names[_FORMAT] = "response_format.json_schema.schema" if named else "response_format.schema"
    elif isinstance(body, Steering) and body.structured_outputs is not None:
        names |= {rf"^{kind}\b": f"structured_outputs.{name}" for name, kind in KINDS.items()}
    return names


def with_own_names(chunks: AsyncGenerator[C, None], body: Shape) -> AsyncGenerator[C, None]:
    """What a call of `body` generates. Its errors have names as in `own_names`."""
    return _renaming(chunks, body) if _names_of(body) else chunks


async def _renaming(chunks: AsyncGenerator[C, None], body: Shape) -> AsyncGenerator[C, None]:
    async with aclosing(chunks):
        with own_names(body):
            async for chunk in chunks:
                yield chunk


def to_embedding(body: EmbeddingsRequest, request_id: str) -> dict[str, Any]:
    """The arguments of `embed.command_of`. Raises InvalidRequest with the field named."""
    texts = prompts("input", body.input)
    return fields_of(body, Command) | {
        "inputs": texts,
        "dimensions": body.dimensions,
        "request_id": body.request_id or request_id,
    }


def to_explanation(body: AttentionRequest, request_id: str) -> ExplainCommand:
    """What the body asks for. Raises InvalidRequest with the field named."""
    if body.prompt is None:
        raise InvalidRequest("prompt must be given: a string, or a list of token ids", "prompt")
    return ExplainCommand(**fields_of(body, ExplainCommand) | {"request_id": body.request_id or request_id})


def fields_of(body: Shape, kind: type[Any]) -> dict[str, Any]:
    """The fields of a record that the body has and gives, as the record has them."""
    given = {name: getattr(body, name) for name in body.model_fields_set & NAMES[kind]}
    return {name: TAKEN.get(name, _plain)(value) for name, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_continuation(body: Continuation) -> dict[str, Any]:
    """What is special of a prompt that is continued."""
    _check_options(body)
    n = 1 if body.n is None else body.n
    if isinstance(body, CompletionRequest) and body.best_of is not None and body.best_of != n:
        raise InvalidRequest(f"best_of must equal n, which is {n}; got {body.best_of}", "best_of")
    scored = _alternatives(body)
    of_prompt = (scored if body.echo and isinstance(body, CompletionRequest) else None, body.prompt_logprobs)
    told = [top for top in of_prompt if top is not None]
    if body.suffix and (not isinstance(body.prompt, str) or body.echo):
        raise InvalidRequest("suffix needs a single prompt that is a text, and no echo", "suffix")
    return {"prompts": prompts("prompt", body.prompt), "prompt_logprobs": max(told, default=None), "logprobs": scored}


def conversation_of(body: Shape, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    """What is special of a conversation, by the API that it is written for: fields of Command, `max_tokens` and `stop`."""
    if getattr(body, "model", None) == "":
        raise InvalidRequest("model must be the name of a model, or absent; got '' (string)", "model")
    match body:
        case ChatRequest():
            return _of_chat(body, template, form, remarks)
        case ResponsesRequest():
            return _of_response(body, template, form, remarks)
        case CountTokensRequest():
            return _of_messages(body, template, form, remarks)
    raise TypeError(type(body))


def _of_chat(body: ChatRequest, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    """The fields of a Command that a chat of OpenAI's API asks for."""
    _check_options(body)
    calling = calling_of(body.tools, body.tool_choice, body.parallel_tool_calls, form, remarks)
    given = dict(body.chat_template_kwargs or {})
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest("add_generation_prompt cannot be true with continue_final_message", "add_generation_prompt")
    if body.add_generation_prompt is False:
        given["add_generation_prompt"] = False

    def write() -> ChatText:
        messages = messages_of(body.documents(), remarks)
        return prompt_of(template, messages, calling, form, given, body.reasoning_effort, continues=continues)

    return _conversation(write, form, calling, body.thinking_token_budget) | {
        "max_tokens": _longest(body),
        "logprobs": _alternatives(body),
    }


def _of_response(body: ResponsesRequest, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    """The fields of a Command that a call of OpenAI's Responses API asks for."""
    if body.max_output_tokens is not None:
        integer("max_output_tokens", body.max_output_tokens, 1, MAX_INT32)
    integer("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    calling = calling_of_response(body, form, remarks)
    effort = None if body.reasoning is None else body.reasoning.effort
    effort = known_effort(template, effort, "reasoning", remarks)

    def write(num_dropped: int = 0) -> ChatText:
        messages = without_oldest(messages_of_input(body.instructions, body.input, remarks), num_dropped)
        return prompt_of(template, messages, calling, form, body.chat_template_kwargs or {}, effort)

    most = len(body.input) - 1 if body.truncation == "auto" and isinstance(body.input, list) else 0
    made = _conversation(write, form, calling, body.thinking_token_budget, most, "input") | {
        "max_tokens": body.max_output_tokens,
        "logprobs": body.logprobs,
    }
    if body.text is not None and body.text.format is not None:
        if body.structured_outputs is not None:
            raise InvalidRequest("text.format and structured_outputs cannot both be given", "structured_outputs")
        made["grammar"] = spec_of(body.text.format)
    return made


def _of_messages(body: CountTokensRequest, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    """The fields of a Command that a call of Anthropic's Messages API asks for."""
    if isinstance(body, MessagesRequest) and body.max_tokens is not None:
        integer("max_tokens", body.max_tokens, 1, MAX_INT32)
    if isinstance(body, MessagesRequest) and body.stop_sequences is not None:
        at_most("stop_sequences", body.stop_sequences, MAX_STOP_STRINGS, "texts")
    calling = calling_of_anthropic(body, form, remarks)
    output, thinking = body.output_config, body.thinking
    effort = known_effort(template, None if output is None else output.effort, "output_config.effort", remarks)
    given = thinking_of(template, None if thinking is None else thinking.type, remarks) | (body.chat_template_kwargs or {})

    def write() -> ChatText:
        messages = messages_of_anthropic(body.system, body.messages, remarks)
        return prompt_of(template, messages, calling, form, given, effort, continues=messages[-1]["role"] == "assistant")

    budget = body.thinking_token_budget
    if thinking is not None and thinking.type == "enabled" and budget is None:
        budget = thinking.budget_tokens
    made = _conversation(write, form, calling, budget)
    if isinstance(body, MessagesRequest):
        made |= {"max_tokens": body.max_tokens, "stop": tuple(body.stop_sequences or ())}
    if output is not None and output.format is not None:
        if isinstance(body, MessagesRequest) and body.structured_outputs is not None:
            raise InvalidRequest("output_config.format and structured_outputs cannot both be given", "structured_outputs")
        made["grammar"] = schema_of(output.format.content)
    return made


def _conversation(
    write: Callable[..., ChatText],
    form: AnswerFormat,
    calling: Calling,
    budget: int | None,
    most_dropped: int = 0,
    name: str = "messages",
) -> dict[str, Any]:
    """`name` is what the API calls the conversation."""
    rules = ChatRules(form, calling, None if budget is None else integer("thinking_token_budget", budget, 0, MAX_INT32))
    return {"prompts": (ChatPrompt(write, most_dropped),), "names": (name,), "chat": rules}


def _check_options(body: Generation) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")


def _longest(body: ChatRequest) -> int | None:
    """The most tokens of a chat's answer, under either of its names; None for what the context has left."""
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


def _alternatives(body: Generation) -> int | None:
    """How many of the most likely tokens to report with each token; None where log probabilities are not asked for."""
    if isinstance(body, CompletionRequest):
        return None if body.logprobs is None else integer("logprobs", body.logprobs, 0, MAX_COMPLETION_LOGPROBS)
    assert isinstance(body, Scored)
    if body.top_logprobs is not None:
        integer("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        if not body.logprobs and body.top_logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _decoding(body: Steering, defaults: Defaults) -> DecodingParams:
    """How scores are to be changed; the shared record where nothing is asked for, which the engine tells by identity."""
    if body.allowed_token_ids == []:
        raise InvalidRequest("allowed_token_ids must hold at least one token id; got an empty list", "allowed_token_ids")
    decoding = DecodingParams(**{**defaults.decoding, **fields_of(body, DecodingParams)})
    return NO_CHANGE if decoding == NO_CHANGE else decoding


def prompts(name: str, value: str | list[str] | list[int] | list[list[int]] | None) -> tuple[Prompt, ...]:
    """The field `name`, one prompt or many, as text or as token ids."""
    if value is None:
        raise InvalidRequest(f"{name} is required: {INPUT}", name)
    if isinstance(value, str):
        return (value,)
    if value and isinstance(value[0], int):
        return (tuple(value),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)  # type: ignore[arg-type]
