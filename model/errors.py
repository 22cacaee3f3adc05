"""Every error that Attend raises on purpose.

    AttendError
    ├── InvalidRequest          the caller sent something that can never work; names the field
    │   ├── ContextTooLong      prompt plus max_tokens exceed what one request may hold
    │   ├── NotSupported        a field of the contract that this build does not carry out yet
    │   └── NoChatTemplate      a chat for a checkpoint that has no chat template
    ├── Unauthenticated         no API key, or one that is not known
    ├── ModelNotFound           the request names a model that is not the served one
    ├── Overloaded              there is no room for the call now; try again after `retry_after` seconds
    │   ├── QueueFull           the engine has as many requests as it may
    │   ├── Busy                work that would take a core from running requests, while they need it
    │   └── RateLimited         the caller's own limit is reached
    ├── Unavailable             loading or draining; try again elsewhere
    ├── DeadlineExceeded        the deadline passed before the first token
    ├── EngineFailed            our bug: the request cannot be finished
    │   ├── OutOfMemory         a step needs more memory than is free; a smaller one may not
    │   └── DeviceFailed        the device computes nothing more in this process: it must end
    ├── CheckpointError         a model folder that cannot be served; names the file and the tensor
    └── SettingError            a setting with a bad value; names it

Nothing here knows of HTTP or gRPC: `service/errors.py` maps each type to its codes.
"""


class AttendError(Exception):
    """Root of the hierarchy. `str(error)` is a sentence fit for the caller."""


class InvalidRequest(AttendError):
    """A request that cannot be carried out as it stands. `field` is the offending field, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt plus max_tokens, does not fit the context.

    `prompt_tokens` are at least so many, where that is known, and `limit` is the context. `max_tokens` is None where the prompt
    alone is too long.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        limit: int = 0,
    ) -> None:
        super().__init__(message, field)
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class NotSupported(InvalidRequest):
    """A known field with a value that this build refuses rather than ignores."""


class NoChatTemplate(InvalidRequest):
    """The checkpoint says nothing of how messages become a prompt."""


class Unauthenticated(AttendError):
    """No API key, or one that is not known. The message never repeats it."""


class ModelNotFound(AttendError):
    """The request names a model other than the served one."""


class Overloaded(AttendError):
    """There is no room for the call now: too many are queued or in preparation. `retry_after` is a hint in seconds."""

    reason = "preparation"
    """What refuses the call, for the metrics."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Overloaded):
    """Backpressure: the engine has as many requests as it may, running and waiting."""

    reason = "queue"


class Busy(Overloaded):
    """The engine has no core to spare for work beside its requests."""

    reason = "busy"


class RateLimited(Overloaded):
    """A limit of the caller's API key is reached. `reason` names the limit: key_requests, key_tokens or key_concurrent."""

    def __init__(self, message: str, retry_after: int, reason: str) -> None:
        super().__init__(message, retry_after)
        self.reason = reason


class Unavailable(AttendError):
    """The server is loading or draining."""

    reason = "draining"


class DeadlineExceeded(AttendError):
    """The request's deadline passed before its first token."""


class EngineFailed(AttendError):
    """The engine could not finish a request through no fault of the caller."""


class OutOfMemory(EngineFailed):
    """A step needs more memory than is free. A smaller step may fit."""


class DeviceFailed(EngineFailed):
    """The device computes nothing more in this process, as after an illegal access to its memory: another must take over."""


class CheckpointError(AttendError):
    """A checkpoint folder is missing, damaged, or of a kind that is not supported."""


class SettingError(AttendError):
    """A setting has a value that cannot be used."""


def is_panic(error: BaseException) -> bool:
    """True for a panic of a library in Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def is_failure(error: BaseException) -> bool:
    """True for what a library raises by mistake: not for the end of the task, or of the process."""
    return isinstance(error, Exception) or is_panic(error)
