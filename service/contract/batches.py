"""Files and batches: the body of POST /v1/batches, the form of POST /v1/files, and the objects that clients read."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictStr
from typing_extensions import TypedDict

from attend.service.contract.answers import Count, ResponseUsage, Seconds
from attend.service.contract.shapes import Shape

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Pairs of a batch's metadata, and characters of a key and of a value, as OpenAI has them."""
Time = Annotated[int | None, Field(description="In seconds since 1970; null until then.")]
FileId = Annotated[str, Field(examples=["file-0123456789abcdef0123456789abcdef"])]
BatchId = Annotated[str, Field(examples=["batch_0123456789abcdef0123456789abcdef"])]


class BatchRequest(Shape):
    """The body of POST /v1/batches."""

    input_file_id: StrictStr = Field(examples=["file-0123456789abcdef0123456789abcdef"])
    endpoint: StrictStr = Field(examples=["/v1/chat/completions"])
    """The route of all lines: /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses."""
    completion_window: StrictStr = Field(examples=["24h"])
    metadata: dict[StrictStr, Any] | None = None
    """At most 16 pairs of texts, of 64 and of 512 characters."""


class FileForm(Shape):
    """The form of POST /v1/files."""

    file: StrictStr = Field(json_schema_extra={"format": "binary"})
    """JSONL: a request a line, with `custom_id`, `method`, `url` and `body`."""
    purpose: Literal["batch"]


class FileObject(TypedDict):
    """A file that was uploaded, or that a batch wrote."""

    id: FileId
    object: Literal["file"]
    bytes: Count
    created_at: Seconds
    expires_at: Seconds
    filename: Annotated[str, Field(examples=["lines.jsonl"])]
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class Page(TypedDict):
    """Of a list. `has_more` is true where `after` asks for more."""

    object: Literal["list"]
    has_more: Annotated[bool, Field(examples=[False])]
    first_id: str | None
    last_id: str | None


class FileList(Page):
    """Files of a caller."""

    data: list[FileObject]


class FileDeleted(TypedDict):
    """What is said of a file that is gone."""

    id: FileId
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    """Why a batch failed: the line of the input file counts from 1."""

    code: Annotated[str, Field(examples=["invalid_json_line"])]
    line: int | None
    message: Annotated[str, Field(examples=["the line is not valid JSON"])]
    param: str | None


class BatchErrors(TypedDict):
    """The first errors of a batch, 50 at most."""

    object: Literal["list"]
    data: list[BatchError]


class BatchObject(TypedDict):
    """A batch of requests, and how far it is."""

    id: BatchId
    object: Literal["batch"]
    endpoint: Annotated[str, Field(examples=["/v1/chat/completions"])]
    model: NotRequired[str]
    """The model that its lines name, once they are checked."""
    errors: BatchErrors | None
    input_file_id: FileId
    completion_window: Literal["24h"]
    status: Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Seconds
    in_progress_at: Time
    expires_at: Seconds
    finalizing_at: Time
    completed_at: Time
    failed_at: Time
    expired_at: Time
    cancelling_at: Time
    cancelled_at: Time
    request_counts: Annotated[dict[str, Count], Field(examples=[{"total": 20, "completed": 5, "failed": 0}])]
    """Lines: all, those in the output file, and those in the error file."""
    usage: ResponseUsage
    metadata: dict[str, str] | None


class BatchList(Page):
    """Batches of a caller, the newest first."""

    data: list[BatchObject]
