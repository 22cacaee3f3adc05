"""The routes of the server, as the lines of a batch ask them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from attend.service.access.caller import Caller
from attend.service.batch.lines import Parse
from attend.service.records import NO_TOKENS, TokenUsage


class Answer(NamedTuple):
    """What a route answers to a line."""

    status: int
    body: bytes
    retry_after: float = 1.0
    usage: TokenUsage = NO_TOKENS
    """Tokens that the answer took; nought where it is an error."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The server, as a line sees it."""

    ask: Callable[[str, bytes, Caller, str], Awaitable[Answer]]
    """The answer of a route to a body of this caller, under a request id."""
    parse: Parse
    most_bytes: Callable[[str], int]
    """The most bytes of a request body, by the path of its route."""
    check_model: Callable[[str], None]
    identity: Callable[[str], str]
    """Name and fingerprint of what answers lines that name this model; of the served model where it has no such name."""
