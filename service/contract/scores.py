"""POST /v1/rerank and /v1/score: request bodies and answers."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictInt, StrictStr, WithJsonSchema
from typing_extensions import TypedDict

from attend.model.errors import InvalidRequest
from attend.model.params import MAX_INT32, integer
from attend.service.contract.answers import AnyText, Count, Id, ModelName, PromptUsage, Seconds, record
from attend.service.contract.commands import fields_of
from attend.service.contract.requests import DeadlineMs, List, RequestId, User
from attend.service.contract.requests import ModelName as AskedModel
from attend.service.contract.shapes import TEXT, Schema, Shape, between, body, list_of, one_of, optional_field
from attend.service.records import MAX_INPUT_TOKENS, MAX_INPUTS, Command

_MANY = {"minItems": 1, "maxItems": MAX_INPUTS}
_DOCUMENT: Schema = {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}
_TEXTS = Annotated[StrictStr | List[StrictStr] | None, WithJsonSchema(one_of(TEXT, list_of(TEXT, **_MANY), {"type": "null"}))]


class Document(Shape):
    """A document as an object."""

    text: StrictStr
    """The text of the document."""


class Scoring(Shape):
    """What the bodies of both routes have in common."""

    model: AskedModel = optional_field()
    instruction: StrictStr | None = optional_field()
    """What a document must do to be relevant, for models that answer yes or no. Default: answer a web search query."""
    max_tokens_per_doc: StrictInt | None = optional_field(**between(1, MAX_INT32))
    """Keep only so many tokens of each document, from the first on. Default: a document that is too long is refused."""
    user: User = None
    request_id: RequestId = optional_field()
    deadline_ms: DeadlineMs = optional_field()


class RerankRequest(Scoring):
    """The body of POST /v1/rerank."""

    model_config = body("query", "documents")

    query: Annotated[StrictStr | None, WithJsonSchema(TEXT)] = None
    """What the documents are to answer."""
    documents: Annotated[List[StrictStr | Document] | None, WithJsonSchema(list_of(one_of(TEXT, _DOCUMENT), **_MANY))] = (
        optional_field(description=f"The documents: texts, or objects with a `text`. At most {MAX_INPUT_TOKENS} tokens in all.")
    )
    top_n: StrictInt | None = optional_field(**between(0, MAX_INT32))
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


def to_rerank(body: RerankRequest, request_id: str) -> dict[str, Any]:
    """The arguments of `score.command_of`. Raises InvalidRequest with the field named."""
    if body.query is None:
        raise InvalidRequest("query is required: a string", "query")
    if body.top_n is not None:
        integer("top_n", body.top_n, 0, MAX_INT32)
    documents = None if body.documents is None else [each if isinstance(each, str) else each.text for each in body.documents]
    return _common(body, request_id) | {"queries": ("query", (body.query,)), "documents": _many("documents", documents)}


def to_scores(body: ScoreRequest, request_id: str) -> dict[str, Any]:
    """The arguments of `score.command_of`. Raises InvalidRequest with the field named."""
    queries = _either(body, "text_1", "queries")
    documents = _either(body, "text_2", "documents")
    count = len(queries[1])
    if count not in (1, len(documents[1])):
        wanted = f"1 text, or as many as {documents[0]}, which has {len(documents[1])}"
        raise InvalidRequest(f"{queries[0]} must hold {wanted}; got {count}", queries[0])
    return _common(body, request_id) | {"queries": queries, "documents": documents}


def _common(body: Scoring, request_id: str) -> dict[str, Any]:
    if body.max_tokens_per_doc is not None:
        integer("max_tokens_per_doc", body.max_tokens_per_doc, 1, MAX_INT32)
    fields = {"request_id": body.request_id or request_id}
    own = {"instruction": body.instruction, "max_tokens_per_doc": body.max_tokens_per_doc}
    return fields_of(body, Command) | fields | own


def _either(body: ScoreRequest, name: str, other: str) -> tuple[str, tuple[str, ...]]:
    """A field that has two names, under the one that the caller uses."""
    if getattr(body, name) is not None and getattr(body, other) is not None:
        raise InvalidRequest(f"{other} is another name of {name}: only one may be given", other)
    used = other if getattr(body, name) is None and getattr(body, other) is not None else name
    value = getattr(body, used)
    return _many(used, [value] if isinstance(value, str) else value)


def _many(name: str, texts: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    if texts is None:
        raise InvalidRequest(f"{name} is required: texts", name)
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise InvalidRequest(f"{name} must hold 1 to {MAX_INPUTS} texts; got {len(texts)}", name)
    return name, tuple(texts)


Score = Annotated[
    float,
    Field(
        description="The probability of yes beside no, from 0 to 1; or the cosine of the two vectors, from -1 to 1.",
        examples=[0.9],
    ),
]


@record
class RerankedDocument(TypedDict):
    """A document that was ranked."""

    text: AnyText


@record
class RerankResult(TypedDict):
    """The score of a document, by its place in `documents`."""

    index: Count
    relevance_score: Score
    document: NotRequired[RerankedDocument]


@record
class Reranked(TypedDict):
    """Documents in the order of their scores; of equal scores the document that comes first."""

    id: Id
    model: ModelName
    usage: PromptUsage
    results: list[RerankResult]


@record
class PairScore(TypedDict):
    """The score of a pair, by the place of its document."""

    index: Count
    object: Literal["score"]
    score: Score


@record
class Scores(TypedDict):
    """The scores of pairs of texts, in the order of the documents."""

    id: Id
    object: Literal["list"]
    created: Seconds
    model: ModelName
    data: list[PairScore]
    usage: PromptUsage
