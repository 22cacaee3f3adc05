"""What /openapi.json says of files and batches."""

from typing import Any

from attend.model.errors import InvalidRequest
from attend.service.batch_settings import OFF
from attend.service.contract import batches
from attend.service.errors import NotThere, QuotaReached, StorageFailed, WrongMediaType
from attend.service.http_api.operation import KEYED, NOT_JSON, TOO_LARGE, Operation

_OFF = NotThere(OFF)
_PURPOSE = InvalidRequest("purpose must be 'batch', the only one of this server; got 'fine-tune' (string)", "purpose")
_WINDOW = InvalidRequest("completion_window must be '24h'; got '1h' (string)", "completion_window")
_QUOTA = QuotaReached("you may keep at most 1000 files, and have 1000: delete some")
_FULL = StorageFailed("files cannot be kept now: No space left on device")
_NO_FORM = WrongMediaType("Content-Type must be multipart/form-data; got 'text/plain'")
_NO_FILE = NotThere("file_id: there is no file 'file-1'", "file_id")
_NO_INPUT = NotThere("input_file_id: there is no file 'file-1'", "input_file_id")
_NO_BATCH = NotThere("batch_id: there is no batch 'batch_1'", "batch_id")


def _query_parameter(name: str, text: str, schema: dict[str, Any], example: object) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema, "example": example}


_PAGE = (
    _query_parameter(
        "limit", "How many of them at most.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, 20
    ),
    _query_parameter("after", "Those beyond the one of this id.", {"type": "string"}, "batch_0123456789abcdef0123456789abcdef"),
)
_FILES_ASKED = (
    _query_parameter("purpose", "Those of this purpose.", {"enum": ["batch", "batch_output"]}, "batch"),
    _query_parameter(
        "limit", "How many of them at most.", {"type": "integer", "minimum": 1, "maximum": 10000, "default": 10000}, 100
    ),
    _query_parameter("order", "The newest first, or the oldest.", {"enum": ["desc", "asc"], "default": "desc"}, "desc"),
    _query_parameter("after", "Those beyond the one of this id.", {"type": "string"}, "file-0123456789abcdef0123456789abcdef"),
)

BATCH_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/files"): Operation(
        batches.FileObject,
        body=batches.FileForm,
        errors=(_PURPOSE, _OFF, _QUOTA, _FULL, TOO_LARGE, _NO_FORM, *KEYED),
        takes="multipart/form-data",
    ),
    ("get", "/v1/files"): Operation(
        batches.FileList, parameters=_FILES_ASKED, errors=(InvalidRequest("limit must be an integer", "limit"), _OFF, *KEYED)
    ),
    ("get", "/v1/files/{file_id}"): Operation(batches.FileObject, errors=(_NO_FILE, *KEYED)),
    ("get", "/v1/files/{file_id}/content"): Operation(
        '{"custom_id": "r1"}\n', errors=(_NO_FILE, _FULL, *KEYED), gives="application/octet-stream"
    ),
    ("delete", "/v1/files/{file_id}"): Operation(
        batches.FileDeleted,
        errors=(
            InvalidRequest("file_id: file-1 is the input of batch_1, which is in_progress: cancel that first", "file_id"),
            _NO_FILE,
            *KEYED,
        ),
    ),
    ("post", "/v1/batches"): Operation(
        batches.BatchObject,
        body=batches.BatchRequest,
        requests={
            "A batch of chats": {
                "input_file_id": "file-0123456789abcdef0123456789abcdef",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "metadata": {"run": "7"},
            }
        },
        errors=(
            _WINDOW,
            _NO_INPUT,
            _QUOTA,
            _FULL,
            TOO_LARGE,
            NOT_JSON,
            *KEYED,
        ),
    ),
    ("get", "/v1/batches"): Operation(
        batches.BatchList, parameters=_PAGE, errors=(InvalidRequest("limit must be an integer", "limit"), _OFF, *KEYED)
    ),
    ("get", "/v1/batches/{batch_id}"): Operation(batches.BatchObject, errors=(_NO_BATCH, *KEYED)),
    ("post", "/v1/batches/{batch_id}/cancel"): Operation(batches.BatchObject, errors=(_NO_BATCH, *KEYED)),
}
