"""The records of files and batches in the database, their ids and their owners."""

import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from attend.service.access.caller import Caller
from attend.service.access.keys import KeyRing
from attend.service.records import NO_TOKENS, TokenUsage

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
"""An id that is none of these is looked up nowhere, and becomes no path."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW: Literal["24h"] = "24h"
"""The one completion window that there is."""
WINDOW_SECONDS = 24 * 3600
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of a batch that has not ended."""
KEY, TENANT = "key ", "tenant "
EVERYBODY = ""
"""The owner where neither keys nor tenants are known: all callers are one."""


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """An id of a batch that nobody can guess."""
    return f"batch_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class File:
    """A file that its owner can see."""

    id: str
    owner: str
    bytes: int
    created: int
    expires: int
    """Both in seconds since 1970."""
    filename: str
    purpose: str


class Counts(NamedTuple):
    """Lines of a batch: all, those answered, and those answered with an error; and the tokens of the answers."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = NO_TOKENS

    def plus(self, completed: int, failed: int, usage: TokenUsage) -> "Counts":
        """The counts with another answer."""
        return Counts(self.total, self.completed + completed, self.failed + failed, self.usage.plus(usage))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. Its times are in seconds since 1970."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    status: str
    created: int
    expires: int
    counts: Counts = field(default_factory=Counts)
    model: str = ""
    output_file: str | None = None
    error_file: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    """When it got each of its statuses."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    identity: str = ""
    """Name and fingerprint of what computes its lines; empty before its input was checked."""


def owner_of(caller: Caller) -> str:
    """The owner that a caller is, as text in the database."""
    if caller.key is not None:
        return f"{KEY}{caller.key.name}"
    return EVERYBODY if caller.tenant is None else f"{TENANT}{caller.tenant}"


def caller_of(owner: str, keys: KeyRing | None) -> Caller | None:
    """Who calls with the lines of this owner; None where its key is gone, or the server asks for keys now and had none."""
    if owner.startswith(KEY):
        key = None if keys is None else keys.find_by_name(owner.removeprefix(KEY))
        return None if key is None else Caller(key, is_batch=True)
    if keys is not None:
        return None
    return Caller(tenant=owner.removeprefix(TENANT) if owner.startswith(TENANT) else None, is_batch=True)
