"""The table of errors: HTTP status, gRPC code, OpenAI type and code. Any other error is a bug: internal_error."""

from dataclasses import dataclass

from grpc import StatusCode

from attend.model.errors import (
    AttendError,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoChatTemplate,
    NotSupported,
    Overloaded,
    RateLimited,
    Unauthenticated,
    Unavailable,
)

SHUTTING_DOWN = "the server is shutting down; try another replica"
"""What a new call is told while running ones end."""


class TooLarge(InvalidRequest):
    """A request body over the limit: HTTP status 413."""


class HeadTooLarge(InvalidRequest):
    """A request's target and headers over the limit."""


class SlowBody(InvalidRequest):
    """A body that did not arrive in time."""


class WrongMediaType(InvalidRequest):
    """A body that does not say that it is JSON, or is compressed."""


class WrongHost(InvalidRequest):
    """A request to a name that this server does not answer to."""


class NotThere(InvalidRequest):
    """A file or a batch that the caller does not have, or a route that is switched off."""


class QuotaReached(InvalidRequest):
    """The caller has as many files, batches, or bytes in them, as it may."""


class StorageFailed(AttendError):
    """The disk is full or broken, or callers have as much as all may."""


class ModelUnavailable(Unavailable):
    """One of several models is loading, failed to load, or has no memory."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClientGone(AttendError):
    """The caller disconnected; the answer is not read."""


@dataclass(frozen=True, slots=True)
class Wire:
    """An error's HTTP status, gRPC code, OpenAI type, and OpenAI code."""

    status: int
    grpc: StatusCode
    kind: str
    code: str


TABLE: dict[type[AttendError], Wire] = {
    InvalidRequest: Wire(400, StatusCode.INVALID_ARGUMENT, "invalid_request_error", "invalid_value"),
    NotSupported: Wire(400, StatusCode.INVALID_ARGUMENT, "invalid_request_error", "unsupported_value"),
    NoChatTemplate: Wire(400, StatusCode.INVALID_ARGUMENT, "invalid_request_error", "no_chat_template"),
    ContextTooLong: Wire(400, StatusCode.INVALID_ARGUMENT, "invalid_request_error", "context_length_exceeded"),
    TooLarge: Wire(413, StatusCode.RESOURCE_EXHAUSTED, "invalid_request_error", "request_too_large"),
    HeadTooLarge: Wire(431, StatusCode.RESOURCE_EXHAUSTED, "invalid_request_error", "request_too_large"),
    SlowBody: Wire(408, StatusCode.DEADLINE_EXCEEDED, "invalid_request_error", "request_timeout"),
    WrongMediaType: Wire(415, StatusCode.INVALID_ARGUMENT, "invalid_request_error", "unsupported_media_type"),
    WrongHost: Wire(421, StatusCode.PERMISSION_DENIED, "invalid_request_error", "host_not_allowed"),
    NotThere: Wire(404, StatusCode.NOT_FOUND, "invalid_request_error", "not_found"),
    QuotaReached: Wire(403, StatusCode.RESOURCE_EXHAUSTED, "invalid_request_error", "storage_limit_reached"),
    ModelNotFound: Wire(404, StatusCode.NOT_FOUND, "invalid_request_error", "model_not_found"),
    ClientGone: Wire(499, StatusCode.CANCELLED, "client_error", "client_gone"),
    Unauthenticated: Wire(401, StatusCode.UNAUTHENTICATED, "authentication_error", "invalid_api_key"),
    RateLimited: Wire(429, StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "rate_limit_exceeded"),
    Overloaded: Wire(429, StatusCode.RESOURCE_EXHAUSTED, "overloaded_error", "queue_full"),
    Unavailable: Wire(503, StatusCode.UNAVAILABLE, "unavailable_error", "shutting_down"),
    ModelUnavailable: Wire(503, StatusCode.UNAVAILABLE, "unavailable_error", "model_unavailable"),
    StorageFailed: Wire(507, StatusCode.UNAVAILABLE, "unavailable_error", "storage_unavailable"),
    DeadlineExceeded: Wire(504, StatusCode.DEADLINE_EXCEEDED, "timeout_error", "deadline_exceeded"),
}

INTERNAL = Wire(500, StatusCode.INTERNAL, "internal_error", "internal_error")


def wire(error: BaseException) -> Wire:
    """The row of an error's type, or of its nearest ancestor in the table."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def sentence(error: BaseException, request_id: str) -> str:
    """The message for the caller: the error's own sentence, or for a bug only the id to ask about."""
    return str(error) if wire(error) is not INTERNAL else f"internal error; request id {request_id}"


def field_of(error: BaseException) -> str | None:
    """The offending field, where the error names one."""
    if isinstance(error, ModelNotFound):
        return "model"
    return error.field if isinstance(error, InvalidRequest) else None


def advice(error: BaseException) -> dict[str, str]:
    """What stands beside an error, as headers or metadata: the seconds after which to try the same call again, where that would
    help.
    """
    if not isinstance(error, (Overloaded, Unavailable)):
        return {}
    return {"retry-after": str(getattr(error, "retry_after", 1))}
