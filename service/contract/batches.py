"""Files and batches: the body of POST /v1/batches, the form of POST /v1/files, and the objects that clients read."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictStr
from typing_extensions import TypedDict

from attend.service.contract.answers import CompletionTokensDetails, Count, ObjectKind, PromptTokensDetails, record
from attend.service.contract.shapes import Shape, body, optional_field

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Pairs of a batch's metadata, and characters of a key and of a value, as OpenAI has them."""
Seconds = Annotated[int, Field(examples=[1767225600])]
Time = Annotated[int | None, Field(examples=[None])]
FileId = Annotated[str, Field(examples=["file-0123456789abcdef0123456789abcdef"])]
BatchId = Annotated[str, Field(examples=["batch_0123456789abcdef0123456789abcdef"])]


class BatchRequest(Shape):
    """The body of POST /v1/batches."""

    model_config = body("input_file_id", "endpoint", "completion_window")

    input_file_id: StrictStr | None = optional_field(examples=["file-0123456789abcdef0123456789abcdef"])
    """A file that was uploaded with the purpose `batch`."""
    endpoint: StrictStr | None = optional_field(examples=["/v1/chat/completions"])
    """The route of all lines: /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses."""
    completion_window: StrictStr | None = optional_field(examples=["24h"])
    """In which the batch is to be computed: 24h, the only one."""
    metadata: dict[StrictStr, Any] | None = optional_field()
    """At most 16 pairs of texts, of 64 and of 512 characters."""


class FileForm(Shape):
    """The form of POST /v1/files."""

    model_config = body("file", "purpose")

    file: StrictStr | None = optional_field(format="binary")
    """JSONL: a request a line, with `custom_id`, `method`, `url` and `body`."""
    purpose: StrictStr | None = optional_field(enum=["batch"])
    """What it is for: batch, the only purpose."""


@record
class FileObject(TypedDict):
    """A file that was uploaded, or that a batch wrote."""

    id: FileId
    """Id of the file."""
    object: ObjectKind[Literal["file"]]
    bytes: Annotated[int, Field(examples=[1024])]
    """Size of the file in bytes."""
    created_at: Seconds
    """When it came, in seconds since 1970."""
    expires_at: Seconds
    """When it is deleted."""
    filename: Annotated[str, Field(examples=["lines.jsonl"])]
    """The file's name, as the caller gave it."""
    purpose: Literal["batch", "batch_output"]
    """An input of a caller, or an output of a batch."""
    status: Literal["processed"]
    """The file is complete."""


@record
class FileList(TypedDict):
    """Files of a caller."""

    object: ObjectKind[Literal["list"]]
    data: list[FileObject]
    """The files of the caller."""
    has_more: Annotated[bool, Field(examples=[False])]
    """True if there are more, which `after` asks for."""
    first_id: FileId | None
    """Id of the first file of this page."""
    last_id: FileId | None
    """Id of the last file of this page."""


@record
class FileDeleted(TypedDict):
    """What is said of a file that is gone."""

    id: FileId
    """Id of the file."""
    object: ObjectKind[Literal["file"]]
    deleted: Literal[True]
    """Always true: the file is deleted."""


@record
class BatchError(TypedDict):
    """Why a batch failed."""

    code: Annotated[str, Field(examples=["invalid_json_line"])]
    """The error's name."""
    line: Annotated[int | None, Field(examples=[3])]
    """The line of the input file, from 1."""
    message: Annotated[str, Field(examples=["the line is not valid JSON"])]
    """A sentence for a person."""
    param: Annotated[str | None, Field(examples=[None])]
    """The field that was wrong."""


@record
class BatchErrors(TypedDict):
    """The first errors of a batch."""

    object: ObjectKind[Literal["list"]]
    data: list[BatchError]
    """The errors, 50 at most."""


@record
class BatchCounts(TypedDict):
    """Lines of a batch."""

    total: Annotated[int, Field(examples=[20])]
    """All lines of the input file."""
    completed: Annotated[int, Field(examples=[5])]
    """Those that are answered, in the output file at the end."""
    failed: Annotated[int, Field(examples=[0])]
    """Those that are answered with an error, in the error file at the end."""


@record
class BatchUsage(TypedDict):
    """Tokens of a batch: the sum over the answers of its lines so far. Lines that failed add none."""

    input_tokens: Annotated[Count, Field(examples=[60])]
    """Tokens of the prompts."""
    input_tokens_details: PromptTokensDetails
    """How many of them were found in the prefix cache."""
    output_tokens: Annotated[Count, Field(examples=[200])]
    """Tokens of the answers."""
    output_tokens_details: CompletionTokensDetails
    """How many of them are reasoning."""
    total_tokens: Annotated[Count, Field(examples=[260])]
    """All tokens of the batch."""


@record
class BatchObject(TypedDict):
    """A batch. Its times are in seconds since 1970."""

    id: BatchId
    """Id of the batch."""
    object: ObjectKind[Literal["batch"]]
    endpoint: Annotated[str, Field(examples=["/v1/chat/completions"])]
    """The route of its lines."""
    model: NotRequired[Annotated[str, Field(examples=["attend"])]]
    """The model that its lines name, once they are checked."""
    errors: Annotated[BatchErrors | None, Field(examples=[None])]
    """Why the batch failed."""
    input_file_id: FileId
    """The file whose lines are computed."""
    completion_window: Literal["24h"]
    """In which it is to be computed."""
    status: Annotated[
        Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"],
        Field(examples=["in_progress"]),
    ]
    """The state of the batch."""
    output_file_id: Annotated[str | None, Field(examples=[None])]
    """The answers, once it has ended."""
    error_file_id: Annotated[str | None, Field(examples=[None])]
    """The lines without an answer, once it has ended."""
    created_at: Seconds
    """When the batch was made."""
    in_progress_at: Time
    """When its lines were checked."""
    expires_at: Seconds
    """When its window ends."""
    finalizing_at: Time
    """When its last line was computed."""
    completed_at: Time
    """When its output files were made."""
    failed_at: Time
    """When the batch failed."""
    expired_at: Time
    """When it was found that its window is over."""
    cancelling_at: Time
    """When it was cancelled."""
    cancelled_at: Time
    """When its last line had ended after that."""
    request_counts: BatchCounts
    """How many of its lines are answered."""
    usage: BatchUsage
    """Tokens that its answers took; an answer that an earlier version wrote counts none."""
    metadata: Annotated[dict[str, str] | None, Field(examples=[{"run": "7"}])]
    """What the caller wrote on it."""


@record
class BatchList(TypedDict):
    """Batches of a caller, the newest first."""

    object: ObjectKind[Literal["list"]]
    data: list[BatchObject]
    """The batches of the caller."""
    has_more: Annotated[bool, Field(examples=[False])]
    """True if there are more, which `after` asks for."""
    first_id: Annotated[str | None, Field(examples=[None])]
    """Id of the first batch of this page."""
    last_id: Annotated[str | None, Field(examples=[None])]
    """Id of the last batch of this page."""
