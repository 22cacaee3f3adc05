"""From a request body to a Command, the same for both transports."""

from collections.abc import Callable
from functools import singledispatch
from typing import Any

from attend.model.errors import InvalidRequest
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams, StopRules
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.chat.prompt import known_effort, prompt_of, thinking_of, without_oldest
from attend.service.contract.anthropic import CountTokensRequest, MessagesRequest, ToolUseChoice, messages_of_anthropic
from attend.service.contract.conversation import calling_of, messages_of
from attend.service.contract.requests import (
    ChatMessageRequest,
    ChatRequest,
    CompletionRequest,
    Generation,
    LogprobFields,
    PromptFields,
    SamplingFields,
)
from attend.service.contract.responses import ResponsesRequest, messages_of_input
from attend.service.contract.shapes import Shape
from attend.service.contract.structured import grammar_of
from attend.service.contract.texts import AttentionRequest, EmbeddingsRequest
from attend.service.records import ChatPrompt, ChatRules, Command, ExplainCommand, Prompt
from attend.service.remarks import Remarks


def to_command(
    body: SamplingFields,
    request_id: str,
    defaults: Defaults = NO_DEFAULTS,
    template: ChatTemplate | None = None,
    form: AnswerFormat = TEXT_ALONE,
    remarks: Remarks | None = None,
    **origin: Any,
) -> Command:
    """What the body asks for. Its own id goes before `request_id`; `defaults` are for what it leaves out; `origin` has the
    caller and the arrival.

    A conversation needs its model's `template` and the `form` of its answers. Its prompt is written when the call is prepared.
    Raises InvalidRequest with the field named.
    """
    remarks = remarks or Remarks(strict=True)
    if isinstance(body, PromptFields):
        own = _of_continuation(body)
    else:
        assert template is not None, "callers refuse a conversation where there is no template"
        own = conversation_of(body, template, form, remarks)
    limits: dict[str, Any] = {name: own.pop(name) for name in ("max_tokens", "stop") if name in own}
    decoding = DecodingParams(**{**defaults.decoding, **given_fields(body, DecodingParams)})
    return Command(
        **call_fields(body, Command, request_id, **origin) | own,
        grammar=grammar_of(body.structured_outputs, *_format_of(body)),
        sampling=SamplingParams(**{**defaults.sampling, **given_fields(body, SamplingParams)}),
        stops=StopRules(**given_fields(body, StopRules) | limits),
        decoding=NO_CHANGE if decoding == NO_CHANGE else decoding,  # the engine tells it by identity
        remarks=remarks,
    )


def _format_of(body: SamplingFields) -> tuple[Any, str]:
    """The form of the answer in the words of the body's API, and where it stands."""
    form: Any = body
    for name in body.format_place.split("."):
        form = form and getattr(form, name)
    return form, body.format_place


def to_embedding(body: EmbeddingsRequest, request_id: str, **origin: Any) -> dict[str, Any]:
    """The arguments of `embed.command_of`. Raises InvalidRequest with the field named."""
    own = {"inputs": prompts(body.input), "dimensions": body.dimensions}
    return call_fields(body, Command, request_id, **origin) | own


def to_explanation(body: AttentionRequest, request_id: str, **origin: Any) -> ExplainCommand:
    """What the body asks for. Raises InvalidRequest with the field named."""
    return ExplainCommand(**call_fields(body, ExplainCommand, request_id, **origin))


def call_fields(body: Shape, kind: type[Any], request_id: str, **origin: Any) -> dict[str, Any]:
    """The fields of a command that the body gives, with the id, the caller and the arrival of the call."""
    given = given_fields(body, kind)
    return {**origin, **given, "request_id": given.get("request_id") or request_id}


def given_fields(body: Shape, kind: type[Any]) -> dict[str, Any]:
    """The fields of a record that the body gives."""
    given = {name: getattr(body, name) for name in body.model_fields_set & kind.__dataclass_fields__.keys()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _of_continuation(body: PromptFields) -> dict[str, Any]:
    """What is special of a prompt that is continued."""
    scored, asked = _alternatives(body), body.prompt_logprobs
    if isinstance(body, CompletionRequest) and body.echo and scored is not None:
        asked = max(scored, asked or 0)
    if body.suffix and (not isinstance(body.prompt, str) or body.echo):
        raise InvalidRequest("suffix needs a single prompt that is a text, and no echo", "suffix")
    return {"prompts": prompts(body.prompt), "prompt_logprobs": asked, "logprobs": scored}


@singledispatch
def conversation_of(body: Shape, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    """What is special of a conversation, by the API that it is written for: fields of Command, `max_tokens` and `stop`."""
    raise TypeError(type(body))


@conversation_of.register
def _of_chat(body: ChatRequest, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    name_place = "tool_name" if isinstance(body, ChatMessageRequest) else ""
    calling = calling_of(body.tools, body.tool_choice, body.parallel_tool_calls, form, remarks, name_place=name_place)
    given, continues = dict(body.chat_template_kwargs or {}), bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest("add_generation_prompt cannot be true with continue_final_message", "add_generation_prompt")
    if body.add_generation_prompt is False:
        given["add_generation_prompt"] = False
    longest, other = body.max_tokens, body.max_completion_tokens
    if None not in (longest, other) and longest != other:
        wanted = f"must equal max_tokens, which is {longest}; got {other}"
        raise InvalidRequest(f"max_completion_tokens {wanted}", "max_completion_tokens")

    def write() -> ChatText:
        messages = messages_of(body.messages, remarks)
        return prompt_of(template, messages, calling, form, given, body.reasoning_effort, continues=continues)

    return _conversation(write, ChatRules(form, calling, body.thinking_token_budget)) | {
        "max_tokens": longest or other,
        "logprobs": _alternatives(body),
    }


@conversation_of.register
def _of_response(body: ResponsesRequest, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    calling = calling_of(body.tools, body.tool_choice, body.parallel_tool_calls, form, remarks, schema="parameters")
    effort = known_effort(template, body.reasoning.effort if body.reasoning else None, "reasoning", remarks)

    def write(num_dropped: int = 0) -> ChatText:
        messages = without_oldest(messages_of_input(body.instructions, body.input, remarks), num_dropped)
        return prompt_of(template, messages, calling, form, body.chat_template_kwargs or {}, effort)

    most = len(body.input) - 1 if body.truncation == "auto" and isinstance(body.input, list) else 0
    return _conversation(write, ChatRules(form, calling, body.thinking_token_budget), most, "input") | {
        "max_tokens": body.max_output_tokens,
        "logprobs": body.logprobs,
    }


@conversation_of.register
def _of_messages(body: CountTokensRequest, template: ChatTemplate, form: AnswerFormat, remarks: Remarks) -> dict[str, Any]:
    choice, thinking, config = body.tool_choice or ToolUseChoice(type="auto"), body.thinking, body.output_config
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice.name is required where its type is 'tool'", "tool_choice.name")
    chosen: Any = {"any": "required", "tool": {"type": "function", "name": choice.name}}.get(choice.type, choice.type)
    parallel = not choice.disable_parallel_tool_use
    calling = calling_of(body.tools, chosen, parallel, form, remarks, "custom", "input_schema")
    effort = known_effort(template, config.effort if config else None, "output_config.effort", remarks)
    given = thinking_of(template, thinking.type if thinking else None, remarks) | (body.chat_template_kwargs or {})

    def write() -> ChatText:
        messages = messages_of_anthropic(body.system, body.messages, remarks)
        return prompt_of(template, messages, calling, form, given, effort, continues=messages[-1]["role"] == "assistant")

    budget = body.thinking_token_budget
    if budget is None and thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
    made = _conversation(write, ChatRules(form, calling, budget))
    if isinstance(body, MessagesRequest):
        made |= {"max_tokens": body.max_tokens, "stop": tuple(body.stop_sequences or ())}
    return made


def _conversation(
    write: Callable[..., ChatText], rules: ChatRules, most_dropped: int = 0, name: str = "messages"
) -> dict[str, Any]:
    """`name` is what the API calls the conversation."""
    return {"prompts": (ChatPrompt(write, most_dropped),), "names": (name,), "chat": rules}


def _alternatives(body: Generation) -> int | None:
    """How many of the most likely tokens to report with each token; None where log probabilities are not asked for."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, LogprobFields)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def prompts(value: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    """One prompt or many, as text or as token ids."""
    if isinstance(value, str):
        return (value,)
    if value and isinstance(value[0], int):
        return (tuple(value),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)  # type: ignore[arg-type]
