"""What /openapi.json says of one route, and the failures that many have."""

from dataclasses import dataclass, field
from typing import Any

from attend.model.errors import RateLimited, Unauthenticated
from attend.service.contract import answers
from attend.service.errors import TooLarge, WrongMediaType

BUG = RuntimeError("not one of ours")
KEY = Unauthenticated("this server needs an API key: send Authorization: Bearer KEY")
SPENT = RateLimited("the API key's limit of requests is reached", retry_after=12, reason="key_requests")
TOO_LARGE = TooLarge("the body must be at most 1048576 bytes; got 2000000")
NOT_JSON = WrongMediaType("Content-Type must be application/json, in UTF-8; got 'text/plain'")
KEYED: tuple[Exception, ...] = (KEY, SPENT, BUG)
"""How a call without a body can fail that needs a key."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The answer where `stream` is true."""

    event: type
    examples: dict[str, dict[str, Any]]
    """Events, by what they are: where they differ from the example of a whole one."""
    is_named: bool = False
    """True if an event has its type as its name, and no `[DONE]` comes last."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    answer: type | str
    """The shape of the answer with status 200, or an example of it where it is plain text."""
    stream: Stream | None = None
    body: type | None = None
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Examples of bodies, by what they show."""
    parameters: tuple[dict[str, Any], ...] = ()
    """Of the header and of the query, where the handler reads them itself, as OpenAPI writes them."""
    errors: tuple[Exception, ...] = (BUG,)
    """One example of each way to fail."""
    failure: type = answers.Error
    """The shape of an error on this route."""
    unwell: tuple[str, str] | None = None
    """What status 503 means where it is plain text, and that text."""
    takes: str = "application/json"
    """The media type of the body."""
    gives: str = "text/plain"
    """The media type of the answer, where that is an example."""

    @property
    def needs_key(self) -> bool:
        """True if the route wants an API key where keys are set."""
        return any(isinstance(error, Unauthenticated) for error in self.errors)
