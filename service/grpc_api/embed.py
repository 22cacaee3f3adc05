"""Embed over gRPC: size checks, and vectors to protobuf in parts."""

from attend.model.engine.request import EngineInfo
from attend.model.errors import ContextTooLong
from attend.model.params import at_most
from attend.service.generation.cooperative import yield_to_loop
from attend.service.generation.embed import EmbeddingResult, most_inputs
from attend.service.generation.fitting import check_total
from attend.v1 import generation_pb2 as pb

AT_ONCE = 8
"""Vectors that are written before the event loop has its next turn: about a millisecond of work."""


def check_sizes(request: pb.EmbedRequest, info: EngineInfo) -> None:
    """Refuse lists that are too long to be carried out, while they are still protobuf's: a message may hold millions of ids.

    Raises InvalidRequest with the field named.
    """
    at_most("input", request.inputs, most_inputs(info), "texts")
    sizes, limit = [len(given.token_ids.ids) for given in request.inputs], info.max_model_len
    if request.HasField("truncate_prompt_tokens"):
        return
    if max(sizes, default=0) > limit:
        size = f"{limit} tokens, which a prompt of {max(sizes)} exceeds"
        raise ContextTooLong(f"input: this model's maximum context length is {size}", "input")
    check_total("input", sum(sizes))


async def to_response(result: EmbeddingResult, fingerprint: str) -> pb.EmbedResponse:
    """The answer. Other work on the event loop runs between its vectors."""
    response = pb.EmbedResponse(num_prompt_tokens=result.num_tokens, system_fingerprint=fingerprint)
    for at, vector in enumerate(result.vectors):
        if at % AT_ONCE == AT_ONCE - 1:
            await yield_to_loop()
        response.embeddings.add(values=vector.tolist())
    return response
