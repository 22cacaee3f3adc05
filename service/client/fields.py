"""The fields of the calls that both HTTP clients take. Written by `make docs`; REFERENCE.md says what they mean."""

from typing import Any, Required, TypedDict


class SamplingFields(TypedDict, total=False):
    """Fields of both calls."""

    model: str
    temperature: float
    top_p: float
    seed: int
    user: str
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    min_tokens: int
    skip_special_tokens: bool
    request_id: str
    deadline_ms: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str
    allowed_token_ids: list[int]
    bad_words: list[str]
    structured_outputs: dict[str, Any]
    max_tokens: int
    stop: str | list[str]
    response_format: dict[str, Any]


class Completion(SamplingFields, total=False):
    """Fields of a completion."""

    prompt: Required[str | list[int]]
    suffix: str
    resume_token_ids: list[int]


class Chat(SamplingFields, total=False):
    """Fields of a chat."""

    chat_template_kwargs: dict[str, Any]
    thinking_token_budget: int
    messages: Required[list[dict[str, Any]]]
    max_completion_tokens: int
    continue_final_message: bool
    reasoning_effort: str
