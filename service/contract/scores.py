"""POST /v1/rerank and /v1/score: request bodies and answers."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest
from attend.service.contract.answers import Count, Id, PromptUsage, Seconds, ServedModel
from attend.service.contract.commands import call_fields
from attend.service.contract.requests import Call, List, NotNegative, Positive
from attend.service.contract.shapes import Shape, optional_field
from attend.service.records import MAX_INPUT_TOKENS, MAX_INPUTS, Command

_TEXTS = StrictStr | Annotated[List[StrictStr], Field(min_length=1, max_length=MAX_INPUTS)] | None


class Document(Shape):
    """A document as an object."""

    text: StrictStr
    """The text of the document."""


class Scoring(Call):
    """What the bodies of both routes have in common."""

    instruction: StrictStr | None = None
    """What a document must do to be relevant, for models that answer yes or no. Default: answer a web search query."""
    max_tokens_per_doc: Positive | None = None
    """Keep only so many tokens of each document, from the first on. Default: a document that is too long is refused."""


class RerankRequest(Scoring):
    """The body of POST /v1/rerank."""

    query: StrictStr
    """What the documents are to answer."""
    documents: Annotated[List[StrictStr | Document], Field(min_length=1, max_length=MAX_INPUTS)] = Field(
        description=f"The documents: texts, or objects with a `text`. At most {MAX_INPUT_TOKENS} tokens in all."
    )
    top_n: NotNegative | None = None
    """How many of the best to report. Default, also for 0: all."""
    return_documents: StrictBool | None = optional_field(False)
    """Report each document's text, too."""


class ScoreRequest(Scoring):
    """The body of POST /v1/score."""

    text_1: _TEXTS = optional_field(
        description="The query, or a list of as many as there are in `text_2`. Its other name: `queries`."
    )
    text_2: _TEXTS = optional_field(
        description=f"The documents: a text, or a list. At most {MAX_INPUT_TOKENS} tokens in all. Its other name: `documents`."
    )
    queries: _TEXTS = optional_field(description="`text_1`, where that is absent.")
    documents: _TEXTS = optional_field(description="`text_2`, where that is absent.")


def to_rerank(body: RerankRequest, request_id: str, **origin: Any) -> dict[str, Any]:
    """The arguments of `score.command_of`."""
    documents = tuple(each if isinstance(each, str) else each.text for each in body.documents)
    texts = {"queries": ("query", (body.query,)), "documents": ("documents", documents)}
    return call_fields(body, Command, request_id, **origin) | texts | _own(body)


def to_scores(body: ScoreRequest, request_id: str, **origin: Any) -> dict[str, Any]:
    """The arguments of `score.command_of`. Raises InvalidRequest with the field named."""
    queries, documents = _either(body, "text_1", "queries"), _either(body, "text_2", "documents")
    count = len(queries[1])
    if count not in (1, len(documents[1])):
        wanted = f"1 text, or as many as {documents[0]}, which has {len(documents[1])}"
        raise InvalidRequest(f"{queries[0]} must hold {wanted}; got {count}", queries[0])
    return call_fields(body, Command, request_id, **origin) | {"queries": queries, "documents": documents} | _own(body)


def _own(body: Scoring) -> dict[str, Any]:
    return {"instruction": body.instruction, "max_tokens_per_doc": body.max_tokens_per_doc}


def _either(body: ScoreRequest, name: str, other: str) -> tuple[str, tuple[str, ...]]:
    """A field that has two names, under the one that the caller uses."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None:
        raise InvalidRequest(f"{other} is another name of {name}: only one may be given", other)
    value = second if first is None else first
    if value is None:
        raise InvalidRequest(f"{name} is required: texts", name)
    return name if second is None else other, (value,) if isinstance(value, str) else tuple(value)


Score = Annotated[float, Field(description="The probability of yes beside no; or the cosine of two vectors.", examples=[0.9])]


class RerankResult(TypedDict):
    """The score of a document."""

    index: Count
    relevance_score: Score
    document: NotRequired[dict[str, str]]


class Reranked(TypedDict):
    """Documents in the order of their scores; of equal scores the document that comes first."""

    id: Id
    model: ServedModel
    usage: PromptUsage
    results: list[RerankResult]


class PairScore(TypedDict):
    """The score of a pair."""

    index: Count
    object: Literal["score"]
    score: Score


class Scores(TypedDict):
    """The scores of pairs of texts, in the order of the documents."""

    id: Id
    object: Literal["list"]
    created: Seconds
    model: ServedModel
    data: list[PairScore]
    usage: PromptUsage
