"""What a call of the client can end with::

    ClientError
    ├── InvalidRequest          this client does not send such a request; names the field
    └── CallFailed
        ├── Refused             the server refused the request, and would again; or it failed in the middle
        ├── GaveUp              too many tries in a row brought no new token
        ├── DeadlinePassed      the call's total time is over, or the next try would come after it
        └── OtherFingerprint    only a server with other weights, or another set-up, is left to go on

A call that failed keeps the part of the answer that has come.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or the part of it that has come."""

    text: str
    token_ids: tuple[int, ...]
    """Those of `resume_token_ids` that the caller sent are not among them."""
    seed: int
    """Draws the same tokens again, with the same `fingerprint`."""
    fingerprint: str | None
    """The server's `system_fingerprint`; None before the first event."""
    finish_reason: str | None
    """None where the answer is not whole."""
    stop_reason: str | int | None
    """The stop string or stop token that ended it."""
    tries: int
    """Calls that were made for it."""


class ClientError(Exception):
    """Root of the hierarchy. `str(error)` is a sentence."""


class InvalidRequest(ClientError):
    """A request that this client does not send. `field` is the offending one."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class CallFailed(ClientError):
    """A call that ended without its whole answer. `answer` is what came of it."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.answer = answer


class Refused(CallFailed):
    """Another try would end the same. `code` is the status's name."""

    def __init__(self, message: str, answer: Answer, code: str) -> None:
        super().__init__(message, answer)
        self.code = code


class GaveUp(CallFailed):
    """As many tries in a row as allowed brought no new token. The message has the last one's reason."""


class DeadlinePassed(CallFailed):
    """The call's total time is over, or the next try would come after it."""


class OtherFingerprint(CallFailed):
    """The server that would go on has another `system_fingerprint`: its tokens would belong to another answer."""
