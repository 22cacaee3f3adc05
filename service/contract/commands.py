"""What a body asks for, as a Command: one way for both transports."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from attend.model.errors import InvalidRequest
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.params import MAX_INT32, MAX_LOGPROBS, NO_CHANGE, DecodingParams, SamplingParams, StopRules, integer
from attend.model.text.chat import ChatTemplate
from attend.model.text.marks import ChatText
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.chat.prompt import prompt_of
from attend.service.contract.chat import ChatRequest
from attend.service.contract.conversation import calling_of, messages_of
from attend.service.contract.requests import (
    MAX_COMPLETION_LOGPROBS,
    CompletionRequest,
    Continuation,
    Generation,
    Scored,
    bias_tokens,
)
from attend.service.contract.shapes import Shape
from attend.service.contract.structured import grammar_of
from attend.service.contract.texts import AttentionRequest, EmbeddingsRequest
from attend.service.records import ChatPrompt, ChatRules, Command, ExplainCommand, Prompt

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


def to_command(
    body: Generation,
    request_id: str,
    defaults: Defaults = NO_DEFAULTS,
    template: ChatTemplate | None = None,
    form: AnswerFormat = TEXT_ALONE,
) -> Command:
    """What the body asks for. Its own id goes before `request_id`; `defaults` are for what it leaves out.

    A chat needs its model's `template` and the `form` of its answers. Its messages become a prompt when the call is prepared,
    and are checked then. Raises InvalidRequest with the field named.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    if isinstance(body, ChatRequest):
        assert template is not None, "callers refuse a chat where there is no template"
        own = _of_chat(body, template, form)
    else:
        assert isinstance(body, Continuation)
        own = _of_continuation(body)
    limit = {"max_tokens": own.pop("max_tokens")} if "max_tokens" in own else {}
    return Command(
        **asked(body, Command) | own | {"request_id": body.request_id or request_id, "logprobs": _alternatives(body)},
        sampling=SamplingParams(**{**defaults.sampling, **asked(body, SamplingParams)}),
        stops=StopRules(**asked(body, StopRules) | limit),
        decoding=_decoding(body, defaults),
        grammar=grammar_of(body.response_format, body.structured_outputs),
    )


def to_embedding(body: EmbeddingsRequest, request_id: str) -> dict[str, Any]:
    """The arguments of `embed.command_of`. Raises InvalidRequest with the field named."""
    texts = prompts("input", body.input)
    return asked(body, Command) | {"inputs": texts, "dimensions": body.dimensions, "request_id": body.request_id or request_id}


def to_explanation(body: AttentionRequest, request_id: str) -> ExplainCommand:
    """What the body asks for. Raises InvalidRequest with the field named."""
    if body.prompt is None:
        raise InvalidRequest("prompt must be given: a string, or a list of token ids", "prompt")
    return ExplainCommand(**asked(body, ExplainCommand) | {"request_id": body.request_id or request_id})


def asked(body: Shape, kind: type[Any]) -> dict[str, Any]:
    """The fields of a record that the body has and gives, as the record has them."""
    given = {name: getattr(body, name) for name in body.model_fields_set & NAMES[kind]}
    return {name: TAKEN.get(name, _plain)(value) for name, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_continuation(body: Continuation) -> dict[str, Any]:
    """What is special of a prompt that is continued."""
    n = 1 if body.n is None else body.n
    if isinstance(body, CompletionRequest) and body.best_of is not None and body.best_of != n:
        raise InvalidRequest(f"best_of must equal n, which is {n}; got {body.best_of}", "best_of")
    of_prompt = (_alternatives(body) if body.echo and isinstance(body, CompletionRequest) else None, body.prompt_logprobs)
    told = [top for top in of_prompt if top is not None]
    return {"prompts": prompts("prompt", body.prompt), "prompt_logprobs": max(told, default=None)}


def _of_chat(body: ChatRequest, template: ChatTemplate, form: AnswerFormat) -> dict[str, Any]:
    """What is special of a conversation."""
    if body.model == "":
        raise InvalidRequest("model must be the name of a model, or absent; got '' (string)", "model")
    calling = calling_of(body.tools, body.tool_choice, body.parallel_tool_calls, form)
    given = body.chat_template_kwargs or {}

    def write() -> ChatText:
        return prompt_of(template, messages_of(body.documents()), calling, given, body.reasoning_effort)

    return {"prompts": (ChatPrompt(write),), "chat": ChatRules(form, calling), "max_tokens": _longest(body)}


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
        if not body.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _decoding(body: Generation, defaults: Defaults) -> DecodingParams:
    """How scores are to be changed; the shared record where nothing is asked for, which the engine tells by identity."""
    if body.allowed_token_ids == []:
        raise InvalidRequest("allowed_token_ids must hold at least one token id; got an empty list", "allowed_token_ids")
    decoding = DecodingParams(**{**defaults.decoding, **asked(body, DecodingParams)})
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
