"""Protobuf to a Command and chunks to protobuf. Ranges are checked in `model/params.py`, after decoding."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from model.engine.request import FinishReason
from model.errors import InvalidRequest, NotSupported
from model.params import SamplingParams, StopRules, describe
from protos.attend.v1 import generation_pb2 as pb
from service.records import Chunk, Command, Prompt

REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}

OFF: dict[str, tuple[Any, ...]] = {
    "decoding.presence_penalty": (0.0,),
    "decoding.frequency_penalty": (0.0,),
    "decoding.repetition_penalty": (1.0,),
    "decoding.logit_bias": (),
    "decoding.allowed_token_ids": (),
    "decoding.bad_words": (),
    "decoding.json_schema": (),
    "decoding.regex": (),
    "decoding.choice": (),
    "decoding.grammar": (),
    "decoding.json_object": (False,),
    "response.prompt_token_ids": (),
    "response.prompt_logprobs": (),
    "response.logprobs": (),
    "response.top_logprobs": (),
    "response.echo": (),
    "response.timing": (),
    "truncate_prompt_tokens": (),
    "cache_salt": (),
    "resume_token_ids": (),
}
"""Fields that this build does not carry out, and their values, beside absent, that ask for nothing."""


def to_command(request: pb.GenerateRequest, request_id: str) -> Command:
    """What the message asks for. Raises InvalidRequest with the field named."""
    refuse_unbuilt(request)
    sampling, stopping = request.sampling, request.stopping
    skip = request.response.skip_special_tokens if request.response.HasField("skip_special_tokens") else True
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
    )


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


def refuse_unbuilt(request: pb.GenerateRequest) -> None:
    """Raise NotSupported where a field of OFF asks for something."""
    for group, message in (("", request), ("decoding.", request.decoding), ("response.", request.response)):
        for descriptor, value in message.ListFields():
            name = group + descriptor.name
            if name in OFF and value not in OFF[name]:
                raise NotSupported(f"{descriptor.name} is not supported yet; got {describe(plain(value))}", descriptor.name)


def plain(value: Any) -> Any:
    """A protobuf value as Python's own, so that a message about it says what JSON would."""
    if isinstance(value, Message):
        return {descriptor.name: plain(item) for descriptor, item in value.ListFields()}
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def to_response(chunks: list[Chunk], request: pb.GenerateRequest, fingerprint: str, *, first: bool) -> pb.GenerateResponse:
    """One message; the first of an answer also tells of the prompt."""
    info = pb.PromptInfo(num_prompt_tokens=chunks[0].num_prompt_tokens) if first else None
    outputs = [_output(chunk, with_tokens=request.response.output_token_ids) for chunk in chunks]
    return pb.GenerateResponse(prompt_info=info, outputs=outputs, seed=chunks[0].seed, system_fingerprint=fingerprint)


def _output(chunk: Chunk, *, with_tokens: bool) -> pb.Output:
    output = pb.Output(index=chunk.index, text=chunk.text, num_tokens=chunk.num_tokens)
    if with_tokens:
        output.token_ids.extend(chunk.token_ids)
    if chunk.finish_reason is not None:
        output.finish_info.finish_reason = REASONS[chunk.finish_reason]
        output.finish_info.num_output_tokens = chunk.num_tokens
        if isinstance(chunk.stop, str):
            output.finish_info.stop_string = chunk.stop
        elif chunk.stop is not None:
            output.finish_info.stop_token_id = chunk.stop
    return output
