"""Embeddings: POST /v1/embeddings and gRPC Embed. A text is an engine request that samples no token.

The vectors have length 1, whether or not the checkpoint's files list a Normalize: so have OpenAI's.
"""

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from attend.model.engine.request import EngineInfo
from attend.model.errors import InvalidRequest
from attend.model.net.adapters import Adapter
from attend.model.params import StopRules, integer
from attend.service.generation.generation import MAX_VECTORS, GenerationService
from attend.service.observe.metrics import RequestRecord
from attend.service.records import MAX_INPUTS, Command

SMALLEST = 1e-12
"""A vector that is shorter is left so: there is no direction in it."""


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The vectors of a call's texts, in their order."""

    vectors: list[Any]
    """Each an array of float32 with length 1."""
    num_tokens: int
    """Tokens of all texts of the call."""


def command_of(
    service: GenerationService,
    inputs: Sequence[str | tuple[int, ...]],
    dimensions: int | None,
    **fields: Any,
) -> Command:
    """A command that asks for embeddings, with these `fields` of its own. Raises InvalidRequest with the field named.

    Whether the model makes embeddings is asked when all else is known to be right, as of a text's length.
    """
    most = most_inputs(service.engine.info)
    if not 1 <= len(inputs) <= most:
        raise InvalidRequest(f"input must hold 1 to {most} texts; got {len(inputs)}", "input")
    if dimensions is not None:
        integer("dimensions", dimensions, 1, service.engine.info.hidden_size)
    return Command(prompts=tuple(inputs), stops=StopRules(max_tokens=0), embedding=service.embedding, **fields)


def most_inputs(info: EngineInfo) -> int:
    """Texts that a call may have: OpenAI's limit, and fewer where their vectors would be more than all calls may hold."""
    return min(MAX_INPUTS, MAX_VECTORS // max(1, info.hidden_size))


async def compute_embeddings(
    service: GenerationService,
    command: Command,
    dimensions: int | None,
    record: RequestRecord,
    resources: ExitStack,
    *,
    adapter: Adapter | None,
) -> EmbeddingResult:
    """The vectors of the command's texts: their first `dimensions` numbers, or all. Raises an AttendError.

    They hold their places among those of all calls until `resources` is closed.
    """
    record.at_once = True
    vectors: list[Any] = [None] * command.num_answers
    num_tokens = 0
    async for chunks in service.generate(command, record, resources, adapter=adapter):
        for chunk in chunks:
            assert chunk.prompt is not None, "an embedding ends with its first output"
            assert chunk.prompt.hidden is not None, "the engine has made no vector"
            vectors[chunk.index] = unit(chunk.prompt.hidden, dimensions)
            num_tokens += chunk.num_prompt_tokens
    return EmbeddingResult(vectors, num_tokens)


def unit(hidden: "array[float]", dimensions: int | None) -> Any:
    """The first numbers of a hidden state, float32, with length 1."""
    numbers = np.array(hidden)[:dimensions]
    return (numbers / max(float(np.linalg.norm(numbers)), SMALLEST)).astype("<f4")
