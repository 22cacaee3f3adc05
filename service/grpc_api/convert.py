"""Protobuf to a Command and chunks to protobuf. Ranges are checked in `model/params.py`, after decoding."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from model.engine.request import FinishReason, TokenLogprob
from model.errors import InvalidRequest
from model.grammar import GrammarSpec
from model.params import MAX_LOGPROBS, NO_CHANGE, DecodingParams, SamplingParams, StopRules, integer
from protos.attend.v1 import generation_pb2 as pb
from service.records import Chunk, Command, Prompt, PromptPart, whole

REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def to_command(request: pb.GenerateRequest, request_id: str) -> Command:
    """What the message asks for. Raises InvalidRequest with the field named."""
    sampling, stopping, response = request.sampling, request.stopping, request.response
    skip = response.skip_special_tokens if response.HasField("skip_special_tokens") else True
    return Command(
        prompts=(prompt(request),),
        sampling=SamplingParams(**given(request, "temperature"), **given(sampling, "top_k", "top_p", "min_p", "seed")),
        stops=StopRules(
            **given(request, "max_tokens"),
            **given(stopping, "min_tokens"),
            stop=tuple(stopping.stop_strings),
            stop_token_ids=tuple(stopping.stop_token_ids),
            include_stop=stopping.include_stop_string,
            ignore_eos=stopping.ignore_eos,
        ),
        n=sampling.n if sampling.HasField("n") else 1,
        model=request.model,
        request_id=request.request_id or request_id,
        deadline_ms=request.deadline_ms if request.HasField("deadline_ms") else None,
        skip_special_tokens=skip,
        decoding=decoding_of(request.decoding),
        grammar=grammar_of(request.decoding),
        echo=response.echo,
        truncate_prompt_tokens=request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        cache_salt=request.cache_salt,
        resume_token_ids=tuple(request.resume_token_ids.ids),
        logprobs=logprobs_of(response),
        prompt_logprobs=response.prompt_logprobs if response.HasField("prompt_logprobs") else None,
    )


def logprobs_of(response: pb.ResponseOptions) -> int | None:
    """Alternatives to report with each token of the answer."""
    if not response.HasField("top_logprobs"):
        return 0 if response.logprobs else None
    if not response.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    return integer("top_logprobs", response.top_logprobs, 0, MAX_LOGPROBS)


def grammar_of(decoding: pb.DecodingParameters) -> GrammarSpec | None:
    """What the answer must look like; None for anything."""
    kind = decoding.WhichOneof("structured_output")
    if kind is None or (kind == "json_object" and not decoding.json_object):
        return None
    if kind == "json_object":
        return GrammarSpec("json_object", "")
    if kind == "choice":
        return GrammarSpec("choice", json.dumps(list(decoding.choice.choices)))
    return GrammarSpec(kind, getattr(decoding, kind))


def decoding_of(decoding: pb.DecodingParameters) -> DecodingParams:
    """How scores are to be changed; the shared record where nothing is asked for, which the engine tells by identity."""
    params = DecodingParams(
        **given(decoding, "presence_penalty", "frequency_penalty", "repetition_penalty"),
        allowed_token_ids=tuple(decoding.allowed_token_ids),
        bad_words=tuple(decoding.bad_words),
        logit_bias=dict(decoding.logit_bias),
    )
    return NO_CHANGE if params == NO_CHANGE else params


def prompt(request: pb.GenerateRequest) -> Prompt:
    """The input: empty text is an empty prompt, empty token ids and no input at all are mistakes."""
    if request.WhichOneof("input") == "text":
        return request.text
    if request.WhichOneof("input") == "token_ids":
        return tuple(request.token_ids.ids)
    raise InvalidRequest("input is required: text or token_ids", "input")


def given(message: Any, *names: str) -> dict[str, Any]:
    """The optional fields that are present, so that defaults stand in one place."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


class Responses:
    """Chunks as the messages of one stream.

    Between an answer's first chunk and its last, messages differ in their text, count and token ids alone. So one is made
    without those, and the others are copies of it, filled in.
    """

    def __init__(self, request: pb.GenerateRequest, fingerprint: str) -> None:
        self._request = request
        self._fingerprint = fingerprint
        self._with_ids = request.response.output_token_ids
        self._forms: dict[int, bytes] = {}

    def of(self, chunks: Sequence[Chunk]) -> pb.GenerateResponse:
        """The message of chunks that came together: one output for each answer, so that nobody has to look for a second."""
        if len(chunks) > 1:
            chunks = whole(chunks)
        if len(chunks) == 1 and chunks[0].is_plain:
            return self._filled(chunks[0])
        return to_response(chunks, self._request, self._fingerprint)

    def _filled(self, chunk: Chunk) -> pb.GenerateResponse:
        form = self._forms.get(chunk.index)
        if form is None:
            empty = replace(chunk, text="", num_tokens=0, token_ids=())
            form = self._forms[chunk.index] = to_response([empty], self._request, self._fingerprint).SerializeToString()
        message = pb.GenerateResponse.FromString(form)
        output = message.outputs[0]
        output.text, output.num_tokens = chunk.text, chunk.num_tokens
        if self._with_ids:
            output.token_ids.extend(chunk.token_ids)
        return message


def to_response(chunks: Sequence[Chunk], request: pb.GenerateRequest, fingerprint: str) -> pb.GenerateResponse:
    """One message; that with the first chunk of the first answer also tells of the prompt."""
    prompt = next((chunk.prompt for chunk in chunks if chunk.index == 0), None)
    info = None if prompt is None else _prompt_info(prompt, request.response)
    outputs = [_output(chunk, request.response) for chunk in chunks]
    timing = _timing(chunks) if request.response.timing else None
    return pb.GenerateResponse(
        prompt_info=info, outputs=outputs, seed=chunks[0].seed, system_fingerprint=fingerprint, timing=timing
    )


def _prompt_info(prompt: PromptPart, options: pb.ResponseOptions) -> pb.PromptInfo:
    info = pb.PromptInfo(num_prompt_tokens=len(prompt.token_ids), num_cached_tokens=prompt.num_cached)
    if options.prompt_token_ids:
        info.token_ids.extend(prompt.token_ids)
    if options.HasField("prompt_logprobs"):
        info.logprobs.extend([0.0, *(scored.logprob for scored in prompt.logprobs)])
        info.top_logprobs.extend([pb.TopLogprobs(), *map(_top, prompt.logprobs)])
    return info


def _top(scored: TokenLogprob) -> pb.TopLogprobs:
    return pb.TopLogprobs(token_ids=[token for token, _ in scored.top], logprobs=[value for _, value in scored.top])


def _timing(chunks: Sequence[Chunk]) -> pb.Timing | None:
    """Milliseconds of the slowest answer that ended."""
    times = [chunk.times for chunk in chunks if chunk.times is not None]
    if not times:
        return None
    return pb.Timing(
        **{f"{name}_ms": max(getattr(each, name) for each in times) * 1e3 for name in ("queue", "prefill", "decode")}
    )


def _output(chunk: Chunk, options: pb.ResponseOptions) -> pb.Output:
    text = chunk.text if chunk.prompt is None else chunk.prompt.text + chunk.text
    output = pb.Output(index=chunk.index, text=text, num_tokens=chunk.num_tokens)
    if options.output_token_ids:
        output.token_ids.extend(chunk.token_ids)
    output.logprobs.extend(scored.logprob for scored in chunk.logprobs)
    if options.top_logprobs:
        output.top_logprobs.extend(map(_top, chunk.logprobs))
    if chunk.finish_reason is not None:
        output.finish_info.finish_reason = REASONS[chunk.finish_reason]
        output.finish_info.num_output_tokens = chunk.num_tokens
        if isinstance(chunk.stop, str):
            output.finish_info.stop_string = chunk.stop
        elif chunk.stop is not None:
            output.finish_info.stop_token_id = chunk.stop
    return output
