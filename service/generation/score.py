"""Scores of documents: POST /v1/rerank and /v1/score. Each is one command of many prompts.

With embeddings a text is a prompt, and the score of a pair is the cosine of its two vectors. A model that answers yes or no
gets a prompt for each pair, in the words of Qwen3-Reranker's model card, and samples one token: the score is the probability of
yes beside no in that place.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.net.adapters import Adapter
from attend.model.params import SamplingParams, StopRules
from attend.model.pooling import EmbeddingRules
from attend.model.scoring import ScoreWay
from attend.service.generation.embed import compute_embeddings
from attend.service.generation.generation import MAX_VECTORS, GenerationService
from attend.service.observe.metrics import RequestRecord
from attend.service.records import BYTES_A_TOKEN, MAX_INPUT_TOKENS, Command, FramedText

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
)
MAX_CHARACTERS = BYTES_A_TOKEN * MAX_INPUT_TOKENS
"""Of queries and instructions, each counted once for each of its documents: as many as a call has bytes."""
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

Texts = tuple[str, tuple[str, ...]]
"""What the caller calls some texts, and these."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The scores of a call's pairs, in the order of the documents."""

    scores: list[float]
    num_tokens: int
    """Tokens of all prompts of the call."""


def command_of(
    service: GenerationService,
    queries: Texts,
    documents: Texts,
    instruction: str | None,
    max_tokens_per_doc: int | None,
    **fields: Any,
) -> Command:
    """A command that asks for the scores of pairs, with these `fields` of its own. One query is for all documents.

    Raises InvalidRequest with the field named. Whether the model gives scores is asked when all else is known to be right.
    """
    name, texts = documents
    fields["names"] = tuple(f"{name}[{at}]" for at in range(len(texts)))
    if service.scoring.way is not ScoreWay.YES_NO:
        if instruction is not None and service.scoring.way is not None:
            raise NotSupported("instruction is for models that answer yes or no: this one compares embeddings", "instruction")
        return _of_vectors(service, queries, [FramedText(text, max_tokens_per_doc) for text in texts], fields)
    heads = _heads(queries, len(texts), instruction or INSTRUCTION)
    pairs = zip(texts, heads, strict=True)
    return Command(
        prompts=tuple(FramedText(text, max_tokens_per_doc, (head, AFTER), add_special_tokens=False) for text, head in pairs),
        sampling=SamplingParams(temperature=0),
        stops=StopRules(max_tokens=1),
        logprobs=0,
        scored_token_ids=service.scoring.tokens,
        **fields,
    )


def _heads(queries: Texts, count: int, instruction: str) -> list[str]:
    """What stands before each of so many documents. Raises InvalidRequest where all of it together is more than can be read."""
    name, asked = queries
    size = count * (len(BEFORE) + len(instruction)) + sum(map(len, asked)) * (count if len(asked) == 1 else 1)
    if size > MAX_CHARACTERS:
        texts = f"{name} and instruction may have at most {MAX_CHARACTERS} characters, counted once for each document"
        raise InvalidRequest(f"{texts}; got {size}", name)
    heads = [BEFORE.format(instruction=instruction, query=query) for query in asked]
    return heads * count if len(heads) == 1 else heads


def _of_vectors(service: GenerationService, queries: Texts, documents: list[FramedText], fields: dict[str, Any]) -> Command:
    """A command for the vectors of the queries and then of the documents."""
    name, texts = queries
    most, count = MAX_VECTORS // max(1, service.engine.info.hidden_size), len(texts) + len(documents)
    if count > most:
        raise InvalidRequest(f"{name} may hold at most {most} texts together with the documents; got {count}", name)
    names = (name,) if len(texts) == 1 else tuple(f"{name}[{at}]" for at in range(len(texts)))
    return Command(
        prompts=(*texts, *documents),
        stops=StopRules(max_tokens=0),
        embedding=service.embedding if service.scoring.way else EmbeddingRules(refusal=service.scoring.refusal),
        **fields | {"names": (*names, *fields["names"])},
    )


async def score(
    service: GenerationService,
    command: Command,
    num_documents: int,
    record: RequestRecord,
    resources: ExitStack,
    *,
    adapter: Adapter | None,
) -> ScoreResult:
    """The scores of the command's pairs. Raises an AttendError."""
    if command.embedding is not None:
        embedded = await compute_embeddings(service, command, None, record, resources, adapter=adapter)
        queries, documents = embedded.vectors[:-num_documents], embedded.vectors[-num_documents:]
        pairs = zip(queries * num_documents if len(queries) == 1 else queries, documents, strict=True)
        return ScoreResult([float(np.dot(query, document)) for query, document in pairs], embedded.num_tokens)
    record.at_once = True
    scores, num_tokens = [math.nan] * num_documents, 0
    async for chunks in service.generate(command, record, resources, adapter=adapter):
        for chunk in chunks:
            found = dict(chunk.logprobs[0].top)
            yes, no = (found[token] for token in command.scored_token_ids)
            scores[chunk.index] = pair_probability(yes - no)
            num_tokens += chunk.num_prompt_tokens
    return ScoreResult(scores, num_tokens)


def pair_probability(log_odds: float) -> float:
    """The first of two probabilities that sum to 1, without an overflow."""
    return 0.5 + 0.5 * math.tanh(log_odds / 2)
