"""Request bodies of OpenAI's routes, and the fields that all generating routes share.

null means absent everywhere. For fields that are not known, or not carried out, see `tolerance.py`.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema, WrapValidator

from attend.model import params
from attend.model.errors import InvalidRequest
from attend.model.params import at_most, describe
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.prompt import EFFORTS
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.conversation import Messages, ToolChoice, Tools
from attend.service.contract.shapes import Range, Shape, optional_field, param
from attend.service.contract.structured import ResponseFormat, StructuredOutputs
from attend.service.contract.tolerance import SAMPLING, Unsupported, use_instead
from attend.service.records import MAX_DEADLINE_MS, MAX_SALT, REQUEST_ID

MAX_COMPLETION_LOGPROBS = 5
T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is looked at: a body may hold half a million."""


def _integers(value: Any, check: Callable[[Any], Any]) -> Any:
    """A list of integers as it is, found to be one a part at a time: the validator would hold the interpreter for all of it."""
    if isinstance(value, list) and all({*map(type, value[at : at + PART])} == {int} for at in range(0, len(value), PART)):
        return value
    return check(value)


PART = 8192
"""Items that are looked at in one go: a tenth of a millisecond."""
TokenId = Annotated[StrictInt, Field(json_schema_extra={"minimum": 0})]
TokenIds = Annotated[List[TokenId], WrapValidator(_integers)]
SOME = Field(json_schema_extra={"minItems": 1})
"""For the document alone: an empty list is refused in other words."""
SomeTokens = Annotated[TokenIds, SOME]
Prompts = StrictStr | Annotated[List[StrictStr], SOME] | SomeTokens | Annotated[List[SomeTokens], SOME]
Word = Annotated[StrictStr, Field(min_length=1, max_length=params.MAX_STOP_CHARACTERS)]
StopTexts = Annotated[List[Word], Field(max_length=params.MAX_STOP_STRINGS)]
Stop = Annotated[Word | StopTexts, AfterValidator(lambda stop: [stop] if isinstance(stop, str) else stop)]
_BIASES: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
    "additionalProperties": {"type": "number", "minimum": -params.MAX_BIAS, "maximum": params.MAX_BIAS},
    "maxProperties": params.MAX_BIASES,
}
TOKENS = "Token ids are from 0 to one below `vocab_size` of /tokenizer_info."
Probability = Annotated[float, Range(0, 1)]
Penalty = Annotated[float, Range(-params.MAX_PENALTY, params.MAX_PENALTY)]
Positive = Annotated[int, Range(1, params.MAX_INT32)]
NotNegative = Annotated[int, Range(0, params.MAX_INT32)]
Alternatives = Annotated[int, Range(0, params.MAX_LOGPROBS)]
TruncateTokens = Annotated[
    Positive | None, Field(description="Truncate the prompt from the left to this many tokens. Default: no truncation.")
]


def bias_tokens(biases: Any) -> dict[int, float]:
    """logit_bias by token id: JSON has no integer keys, so they are plain digits. Raises InvalidRequest."""
    if not isinstance(biases, dict):
        raise InvalidRequest(f"logit_bias must be an object; got {describe(biases)}", "logit_bias")
    at_most("logit_bias", biases, params.MAX_BIASES, "entries")
    for key, bias in biases.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", key):
            raise InvalidRequest(f"logit_bias must have token ids as keys, in digits; got {describe(key)}", "logit_bias")
        if type(bias) not in (int, float):
            raise InvalidRequest(f"logit_bias must hold numbers; got {describe(bias)}", "logit_bias")
    return {int(key): bias for key, bias in biases.items()}


class StreamOptions(Shape):
    """Options of the stream."""

    include_usage: StrictBool | None = optional_field(False)
    """One more event at the end, with the token counts and no choices."""
    continuous_usage_stats: StrictBool | None = optional_field(False)
    """The token counts so far with every event."""


class Call(Shape):
    """What the bodies of all calls that compute have in common."""

    model: StrictStr | None = None
    """The name of the served model or of a LoRA adapter; absent means the served one. Any other is 404."""
    user: Annotated[StrictStr, Field(max_length=256)] | None = None
    """Your name for the person who asks; not used."""
    request_id: StrictStr | None = optional_field(pattern=f"^({REQUEST_ID.pattern})?$")
    """The request id, in the answer and in the logs. Default, also for an empty one: X-Request-Id, or a new one."""
    deadline_ms: Annotated[int, Range(1, MAX_DEADLINE_MS)] | None = None
    """Milliseconds in which to answer; then the status is 504. Default: the server's own limit."""


class SamplingFields(Call):
    """What the bodies of all generating routes have in common: how tokens are drawn, and what the call may take."""

    format_place: ClassVar = "response_format"
    """Where the body has the form of its answer."""

    temperature: Annotated[float, Range(0, params.MAX_TEMPERATURE)] | None = param("temperature")
    """Sampling temperature: divides the logits. 0 is greedy: the most likely token, of equals the one with the lowest id."""
    top_p: Probability | None = param("top_p")
    """Top-p (nucleus) sampling: sample among the most likely tokens that together reach this probability; 0 leaves one."""
    stream: StrictBool | None = optional_field(False)
    """Stream the answer as server-sent events."""
    seed: Annotated[int, Range(params.SEED_LOW, params.SEED_HIGH)] | None = param("seed")
    """Same seed, same request, same `system_fingerprint`: same answer. Absent lets the service choose one and report it."""
    top_k: Annotated[int, Range(-1, params.MAX_INT64)] | None = param("top_k")
    """Top-k sampling: sample among the k most likely tokens; 0 and -1 mean all."""
    min_p: Probability | None = param("min_p")
    """Min-p sampling: sample among tokens at least this likely relative to the most likely one."""
    stop_token_ids: Annotated[TokenIds, Field(max_length=params.MAX_STOP_TOKENS)] | None = None
    """Tokens that end an answer. Of a chat a special token, or a marker, ends it anywhere, any other the content alone."""
    include_stop_str_in_output: StrictBool | None = optional_field(False)
    """Leave the stop string, or the stop token's text, in the answer."""
    ignore_eos: StrictBool | None = optional_field(False)
    """Do not end at the model's end-of-text token."""
    min_tokens: NotNegative | None = param("min_tokens")
    """Minimum number of new tokens: no stop token and no stop string ends the answer before. At most `max_tokens`."""
    skip_special_tokens: StrictBool | None = optional_field(True)
    """Leave special tokens out of the answer's text."""
    deadline_ms: Annotated[int, Range(1, MAX_DEADLINE_MS)] | None = None
    """Milliseconds in which to finish what fits; then `stop_reason` is `deadline`, or the status 504 where nothing did.
    Default: the server's own limit."""
    presence_penalty: Penalty | None = param("presence_penalty")
    """Subtracted from the logit of every token that the answer already has."""
    frequency_penalty: Penalty | None = param("frequency_penalty")
    """Subtracted from a token's logit once for each time that the answer has it."""
    repetition_penalty: Annotated[float, Range(0, params.MAX_REPETITION_PENALTY, above=True)] | None = param(
        "repetition_penalty"
    )
    """Divides the positive, and multiplies the negative, logits of tokens of the prompt and the answer."""
    logit_bias: Annotated[dict[int, float], BeforeValidator(bias_tokens), WithJsonSchema(_BIASES)] | None = None
    """Added to the logits of tokens, by token id in digits."""
    truncate_prompt_tokens: TruncateTokens = None
    priority: Annotated[int, Range(0, params.MAX_PRIORITY)] | None = optional_field(params.DEFAULT_PRIORITY)
    """Higher first, among the calls of one API key or tenant. A level counts as much as ten seconds of waiting. A running call
    is not stopped for one of higher priority. A key's max_priority may be lower."""
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=MAX_SALT)] | None = None
    """Cached prefixes are shared only within one salt. Default: one salt for all. API keys and tenants never share any."""
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """Only these tokens may be sampled. Default: all."""
    bad_words: Annotated[List[Word], Field(max_length=params.MAX_BAD_WORDS)] | None = None
    """Texts whose tokens never follow each other in an answer."""
    structured_outputs: StructuredOutputs | None = None
    """What the answer must look like, in vLLM's words: one of these. Not together with `response_format` or `min_tokens`.
    Default: anything."""


class Generation(SamplingFields):
    """What completions and chats have in common."""

    max_tokens: NotNegative | None = param("max_tokens")
    """The most tokens of an answer. 0, which computes the prompt alone, needs `echo` or `prompt_logprobs`. Prompt and answer
    together have at most `max_model_len` tokens."""
    n: Annotated[int, Range(1, params.MAX_CHOICES)] | None = optional_field(1)
    """Answers to each prompt."""
    stream_options: StreamOptions | None = None
    """Options of the stream. Only where `stream` is true."""
    stop: Stop | None = None
    """Texts that end an answer. Of a chat they end the content: reasoning and calls of tools may hold them."""
    return_token_ids: StrictBool | None = optional_field(False)
    """Report the token ids of prompt and answer."""
    response_format: ResponseFormat | None = None
    """What the answer must look like, in OpenAI's words. Default: anything."""
    timing: StrictBool | None = optional_field(False)
    """Report queue, prefill and decode time."""


class LogprobFields(Shape):
    """Log probabilities of an answer's tokens, as chats and gRPC ask for them."""

    logprobs: StrictBool | None = optional_field(False)
    """Report the log probability of each token."""
    top_logprobs: Alternatives | None = optional_field(0)
    """How many of the most likely tokens to report at each position. Only where `logprobs` is true."""


class TemplateFields(Shape):
    """What the bodies have in common whose prompt the chat template writes."""

    chat_template_kwargs: dict[StrictStr, Any] | None = None
    """What the chat template takes beside the messages. Default: nothing."""
    thinking_token_budget: NotNegative | None = None
    """The most tokens of reasoning: then the reasoning ends, and the answer follows. Default: no limit."""


class PromptFields(Generation):
    """What the calls have in common that continue a prompt as it stands."""

    prompt: Prompts = Field(
        description="What to continue: a text, token ids, or a list of either, answered in turn; an empty text is the "
        f"start-of-text token. {TOKENS} `n` times the number of prompts is at most {params.MAX_CHOICES_TIMES_PROMPTS}.",
    )
    suffix: StrictStr | None = optional_field("")
    """What follows the answer: the model fills in what stands between it and `prompt`, where its vocabulary has the tokens for
    that. Needs a single prompt that is a text, without `echo`."""
    echo: StrictBool | None = optional_field(False)
    """Begin each answer with its prompt."""
    prompt_logprobs: Alternatives | None = None
    """Report the log probability of each prompt token, and of this many of the most likely at its position. With `echo` the
    larger of it and `logprobs` counts. Default: report none."""
    resume_token_ids: TokenIds | None = None
    """Tokens of the answer that the caller has already: with the same seed the answer goes on after them, and counts are those
    of the whole answer. Needs a single prompt and `n` = 1."""


class CompletionRequest(PromptFields):
    """The body of POST /v1/completions."""

    unsupported: ClassVar = SAMPLING | dict.fromkeys(
        (
            *("messages", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort", "tools", "tool_choice"),
            *("parallel_tool_calls", "top_logprobs", "continue_final_message", "add_generation_prompt"),
            "thinking_token_budget",
        ),
        Unsupported((), "it is a field of POST /v1/chat/completions"),
    )
    unsupported["best_of"] = Unsupported((1,), "use n")

    logprobs: Annotated[int, Range(0, MAX_COMPLETION_LOGPROBS)] | None = None
    """Report the log probability of each token, and of this many of the most likely ones at its position. Default: none."""


class GenerateRequest(LogprobFields, PromptFields):
    """What a message GenerateRequest of gRPC asks for."""

    adapter: StrictStr | None = None
    """The name of a LoRA adapter, beside the served model's."""


_COMPLETION = "it is a field of POST /v1/completions"


class ChatRequest(LogprobFields, TemplateFields, Generation):
    """The body of POST /v1/chat/completions: a conversation, which the answer continues."""

    unsupported: ClassVar = SAMPLING | use_instead(
        audio="answers are text",
        web_search_options="the model has the tools that a call declares, and no others",
        prompt="use messages",
        prompt_logprobs=_COMPLETION,
    )
    unsupported |= {
        "functions": Unsupported(([],), "use tools and tool_choice"),
        "function_call": Unsupported(("none",), "use tools and tool_choice"),
        "modalities": Unsupported((["text"],), "answers are text"),
        "best_of": Unsupported((1,), "use n"),
        "suffix": Unsupported(("",), _COMPLETION),
        "echo": Unsupported((False,), _COMPLETION),
        "resume_token_ids": Unsupported(([],), _COMPLETION),
    }

    max_tokens: Positive | None = None
    """The most tokens of an answer, under its older name. Absent means what the context has left."""
    messages: Messages = Field(
        description=f"The conversation, 1 to {MAX_MESSAGES} messages, written as a prompt by the checkpoint's chat template."
    )
    max_completion_tokens: Positive | None = None
    """The most tokens of an answer. Absent means what the context has left. Must equal `max_tokens` where both are given."""
    continue_final_message: StrictBool | None = optional_field(False)
    """The last message is the assistant's, and the answer goes on in it. The answer has what is new alone."""
    add_generation_prompt: StrictBool | None = None
    """True if the prompt ends where an answer begins. Default: true; false with `continue_final_message`."""
    tools: Tools | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}, their schemas at most {MAX_SCHEMA_BYTES} bytes "
        "in all, 64 KiB where calls are enforced. Default: none.",
    )
    tool_choice: ToolChoice | None = None
    """`none`: the tools are not shown to the model. `required`, or a function by its name: the answer is calls, whose arguments
    obey the schemas. Default: `auto`, the model decides; then only calls of `strict` tools are held to obey."""
    parallel_tool_calls: StrictBool | None = optional_field(True)
    """An answer may hold more than one call."""
    reasoning_effort: Annotated[StrictStr, WithJsonSchema({"enum": list(EFFORTS)})] | None = None
    """How much the model is to reason, where its chat template knows such a thing. A template that can only leave reasoning out
    does so for `none`. Default: the template's."""


class ChatMessageRequest(ChatRequest):
    """What a message ChatRequest of gRPC asks for."""

    adapter: StrictStr | None = None
    """The name of a LoRA adapter, beside the served model's."""
