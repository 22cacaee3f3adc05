"""OpenAI's shapes: a completion request to a Command, chunks to completion objects."""

import re
from typing import Any

from attend.model.errors import InvalidRequest
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.params import DEFAULT_PRIORITY, NO_CHANGE, DecodingParams, SamplingParams, StopRules, describe, integer
from attend.service.contract.requests import MAX_COMPLETION_LOGPROBS, CompletionRequest, Generation
from attend.service.contract.structured import grammar_of
from attend.service.records import Command, Prompt

DEFAULT_MAX_TOKENS = 16


def to_command(body: CompletionRequest, request_id: str, defaults: Defaults = NO_DEFAULTS) -> Command:
    """What the body asks for; `defaults` are for what it leaves out. Raises InvalidRequest with the field named."""
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(f"best_of must equal n, which is {n}; got {body.best_of}", "best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    if body.logprobs is not None:
        integer("logprobs", body.logprobs, 0, MAX_COMPLETION_LOGPROBS)
    of_prompt = (body.logprobs if body.echo else None, body.prompt_logprobs)
    return Command(
        prompts=prompts(body.prompt),
        sampling=sampling_of(body, defaults),
        stops=stops_of(body, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens),
        n=n,
        model=body.model or "",
        request_id=request_id,
        deadline_ms=body.deadline_ms,
        skip_special_tokens=body.skip_special_tokens is not False,
        decoding=decoding_of(body, defaults),
        logprobs=body.logprobs,
        prompt_logprobs=max((top for top in of_prompt if top is not None), default=None),
        echo=bool(body.echo),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
        cache_salt=body.cache_salt or "",
        grammar=grammar_of(body.response_format, body.structured_outputs),
        resume_token_ids=tuple(body.resume_token_ids or ()),
    )


def sampling_of(body: Generation, defaults: Defaults) -> SamplingParams:
    """How tokens are to be drawn."""
    return SamplingParams(**{**defaults.sampling, **given(body, "temperature", "top_p", "top_k", "min_p", "seed")})


def stops_of(body: Generation, max_tokens: int | None) -> StopRules:
    """When answers are to end."""
    return StopRules(
        max_tokens=max_tokens,
        **given(body, "min_tokens", "ignore_eos"),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
    )


def decoding_of(body: Generation, defaults: Defaults) -> DecodingParams:
    """How scores are to be changed; the shared record where nothing is asked for, which the engine tells by identity."""
    values = {**defaults.decoding, **given(body, "presence_penalty", "frequency_penalty", "repetition_penalty")}
    if body.logit_bias:
        values["logit_bias"] = {bias_token(key): bias for key, bias in body.logit_bias.items()}
    if body.bad_words:
        values["bad_words"] = tuple(body.bad_words)
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must hold at least one token id; got an empty list", "allowed_token_ids")
        values["allowed_token_ids"] = tuple(body.allowed_token_ids)
    decoding = DecodingParams(**values)
    return NO_CHANGE if decoding == NO_CHANGE else decoding


def bias_token(key: str) -> int:
    """A key of logit_bias: JSON has no integer keys, so it is a token id in plain digits."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", key):
        raise InvalidRequest(f"logit_bias must have token ids as keys, in digits; got {describe(key)}", "logit_bias")
    return int(key)


def given(body: Generation, *names: str) -> dict[str, Any]:
    """The fields that are not null, so that defaults stand in one place."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def prompts(value: str | list[str] | list[int] | list[list[int]] | None) -> tuple[Prompt, ...]:
    """One prompt or many, as text or as token ids."""
    if value is None:
        raise InvalidRequest(
            "prompt is required: a string, a list of strings, token ids, or a list of token-id lists", "prompt"
        )
    if isinstance(value, str):
        return (value,)
    if value and isinstance(value[0], int):
        return (tuple(value),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)  # type: ignore[arg-type]
