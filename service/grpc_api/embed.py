"""Embed over gRPC: protobuf to a Command, and vectors to protobuf, part by part."""

from attend.model.errors import ContextTooLong, InvalidRequest
from attend.model.params import at_most
from attend.service.generation.embed import MOST_INPUTS, Embedded, command_of
from attend.service.generation.generation import GenerationService
from attend.service.generation.turns import turn
from attend.service.records import Command
from attend.v1 import generation_pb2 as pb

AT_ONCE = 8
"""Vectors that are written before the event loop has its next turn: about a millisecond of work."""


def to_command(request: pb.EmbedRequest, request_id: str, service: GenerationService) -> Command:
    """What the message asks for. Raises InvalidRequest with the field named."""
    at_most("input", request.inputs, MOST_INPUTS, "texts")
    limit = None if request.HasField("truncate_prompt_tokens") else service.engine.info.max_model_len
    return command_of(
        service,
        [_text(given, limit) for given in request.inputs],
        dimensions_of(request),
        model=request.model,
        request_id=request.request_id or request_id,
        deadline_ms=request.deadline_ms if request.HasField("deadline_ms") else None,
        truncate_prompt_tokens=request.truncate_prompt_tokens if limit is None else None,
    )


def dimensions_of(request: pb.EmbedRequest) -> int | None:
    """Numbers of a vector; None for all."""
    return request.dimensions if request.HasField("dimensions") else None


def _text(given: pb.EmbedInput, limit: int | None) -> str | tuple[int, ...]:
    """A text or its tokens; a message may hold millions of ids, so they are counted first."""
    if given.WhichOneof("input") is None:
        raise InvalidRequest("input must hold text or token_ids", "input")
    if given.HasField("text"):
        return str(given.text)
    tokens = given.token_ids.ids
    if limit is not None and len(tokens) > limit:
        size = f"{limit} tokens, which a prompt of {len(tokens)} exceeds"
        raise ContextTooLong(f"input: this model's maximum context length is {size}", "input")
    return tuple(tokens)


async def to_response(embedded: Embedded, fingerprint: str) -> pb.EmbedResponse:
    """The answer. Other work on the event loop runs between its vectors."""
    response = pb.EmbedResponse(num_prompt_tokens=embedded.num_tokens, system_fingerprint=fingerprint)
    for at, vector in enumerate(embedded.vectors):
        if at % AT_ONCE == AT_ONCE - 1:
            await turn()
        response.embeddings.add(values=vector.tolist())
    return response
