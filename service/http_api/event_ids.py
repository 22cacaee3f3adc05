"""Ids of a stream's events, and `Last-Event-ID`: any replica can go on after any event, and none keeps anything for it.

An answer is a function of its request and its seed. So an id holds the seed, a digest of the fingerprint, how many tokens have
come by its event, and a digest of these: `id: 1f3a9c0b2d4e.8a2b7c.37.5d1c09e2`, with `!` where the answer has ended. To go on,
the answer is made again, and the events up to that token are not written. Where bits depend on the batch it may be another
answer. Then the digests of its tokens differ, and the stream ends with an error.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attend.model.errors import InvalidRequest
from attend.model.params import SEED_HIGH, SEED_LOW, describe
from attend.service.records import Chunk, Command, Shown, digest_of

HEADER = "Last-Event-ID"
DIGITS = 6
"""Of the fingerprint's digest."""
_ID = re.compile(r"(-?[0-9a-f]{1,16})\.([0-9a-f]{6})\.([0-9]{1,9})\.([0-9a-f]{8})(!?)")
PARAMETER = {
    "name": HEADER,
    "in": "header",
    "description": "The id of the last event that came of a stream that broke. With the same body the stream goes on after it.",
    "schema": {"type": "string", "pattern": f"^({_ID.pattern})?$"},
}
"""The header, as OpenAPI writes it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an id says: where in which answer a stream was."""

    seed: int
    digest: str
    """Of the fingerprint."""
    shown: Shown
    """The answer up to and with its event."""
    ended: bool
    """Whether its event was the answer's last."""


class Numbering:
    """Gives the events of one answer their ids, and leaves out those that the caller has. It is told of each chunk once."""

    def __init__(self, fingerprint: str, received: Iterable[int] = (), after: Place | None = None) -> None:
        """`received` are the tokens that the caller sent of the answer."""
        self.fingerprint = fingerprint
        self.after = after
        self._digest = digest_of(received)

    def start(self, seed: int) -> bytes:
        """An id's line up to the number of tokens."""
        return b"id: %s.%s." % (_hex(seed), digest(self.fingerprint).encode())

    def end(self, chunk: Chunk) -> bytes:
        """The rest of the line of a chunk's event."""
        self._digest = digest_of(chunk.token_ids, self._digest)
        return b"%d.%08x%s\n" % (chunk.num_tokens, self._digest, b"" if chunk.finish_reason is None else b"!")

    def new(self, chunk: Chunk) -> Chunk | None:
        """What of a chunk the caller lacks; None for nothing. An end that comes too early, as by a deadline, has no text."""
        after = self.after
        if after is None or chunk.num_tokens > after.shown.num_tokens:
            return chunk
        if chunk.num_tokens == after.shown.num_tokens and chunk.finish_reason is not None and not after.ended:
            return chunk
        self._digest = digest_of(chunk.token_ids, self._digest)
        if chunk.finish_reason is None or after.ended:
            return None
        return replace(chunk, text="", token_ids=(), logprobs=())


def place_of(values: Sequence[str]) -> Place | None:
    """What the values of the header say; None where there are none, or an empty one. Raises InvalidRequest."""
    value = ", ".join(values)
    if not value:
        return None
    found = _ID.fullmatch(value)
    if found is None or not SEED_LOW <= int(found[1], 16) <= SEED_HIGH:
        raise InvalidRequest(f"{HEADER} must be the id of an event of /v1/completions; got {describe(value)}", HEADER)
    return Place(int(found[1], 16), found[2], Shown(int(found[3]), int(found[4], 16)), bool(found[5]))


def going_on(command: Command, place: Place, fingerprint: str, *, stream: bool) -> Command:
    """The command whose answer goes on after an event. Raises InvalidRequest where it would be another answer."""
    given, received, most = command.sampling.seed, len(command.resume_token_ids), command.stops.max_tokens
    wrong = None
    if not stream:
        wrong = "goes on with a stream, and this request has no stream: true"
    elif command.num_answers > 1:
        wrong = f"goes on with a stream of one answer, and this request asks for {command.num_answers}"
    elif place.digest != digest(fingerprint):
        wrong = f"belongs to an answer with another system_fingerprint than {fingerprint}, which serves now; ask without it"
    elif given is not None and given != place.seed:
        wrong = f"belongs to an answer with the seed {place.seed}, and this request has the seed {given}"
    elif place.shown.num_tokens < received or (most is not None and place.shown.num_tokens > most):
        wrong = f"must be after {received} to {most} tokens, by resume_token_ids and max_tokens; got {place.shown.num_tokens}"
    if wrong is not None:
        raise InvalidRequest(f"{HEADER} {wrong}", HEADER)
    return replace(command, sampling=replace(command.sampling, seed=place.seed), shown=place.shown)


def refuse(values: Sequence[str]) -> None:
    """Raise InvalidRequest where the header comes to a route whose events have no ids."""
    if any(values):
        raise InvalidRequest(f"{HEADER} goes on with streams of /v1/completions, and not of a chat", HEADER)


def digest(fingerprint: str) -> str:
    """Tells fingerprints apart, in few characters."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:DIGITS]


def _hex(number: int) -> bytes:
    return format(number, "x").encode()
