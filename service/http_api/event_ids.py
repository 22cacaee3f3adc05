"""Resumable streams: event ids and `Last-Event-ID`. Any replica can resume, and none keeps state.

An answer is a function of its request and its seed. So an id holds the seed, a digest of the fingerprint and the request, how
many tokens have come by its event, and a digest of these: `id: 1f3a9c0b2d4e.8a2b7c.37.5d1c09e2`, with `!` where the answer has
ended. To go on, the answer is made again, and the events up to that token are not written. Where bits depend on the batch it
may be another answer. Then the digests of its tokens differ, and the stream ends with an error.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from attend.model.errors import InvalidRequest
from attend.model.params import NO_CHANGE, SEED_HIGH, SEED_LOW, DecodingParams, SamplingParams, StopRules, describe
from attend.service.records import Chunk, Command, ShownPrefix, digest_of

HEADER = "Last-Event-ID"
DIGITS = 6
"""Of the digest of fingerprint and request."""
PART = 8192
"""Characters or token ids of a request that are digested in one go: the interpreter waits for each part."""
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
    """Of the fingerprint and the request."""
    shown_prefix: ShownPrefix
    """The answer up to and with its event."""


class Numbering:
    """Gives the events of one answer their ids, and leaves out those that the caller has. It is told of each chunk once."""

    def __init__(self, digest: str, received_digest: int = 0, after: ShownPrefix | None = None) -> None:
        """`digest` is that of fingerprint and request; `received_digest` that of the tokens that the caller sent."""
        self.digest = digest
        self.after = after
        self._digest = received_digest

    def start(self, seed: int) -> bytes:
        """An id's line up to the number of tokens."""
        return b"id: %s.%s." % (_hex(seed), self.digest.encode())

    def end(self, chunk: Chunk) -> bytes:
        """The rest of the line of a chunk's event."""
        self._digest = digest_of(chunk.token_ids, self._digest)
        return b"%d.%08x%s\n" % (chunk.num_tokens, self._digest, b"" if chunk.finish_reason is None else b"!")

    def new(self, chunk: Chunk) -> Chunk | None:
        """What of a chunk the caller lacks: all of it, or nothing, which is None."""
        after = self.after
        if after is None or chunk.num_tokens > after.num_tokens:
            return chunk
        if chunk.num_tokens == after.num_tokens and chunk.finish_reason is not None and not after.has_ended:
            return chunk
        self._digest = digest_of(chunk.token_ids, self._digest)
        return None


def place_of(values: Sequence[str]) -> Place | None:
    """What the values of the header say; None where there are none, or an empty one. Raises InvalidRequest."""
    value = ", ".join(values)
    if not value:
        return None
    found = _ID.fullmatch(value)
    if found is None or not SEED_LOW <= int(found[1], 16) <= SEED_HIGH:
        raise InvalidRequest(f"{HEADER} must be the id of an event of /v1/completions; got {describe(value)}", HEADER)
    return Place(int(found[1], 16), found[2], ShownPrefix(int(found[3]), int(found[4], 16), bool(found[5])))


def going_on(command: Command, place: Place, fingerprint: str, own: str | None, context: int, *, stream: bool) -> Command:
    """The command whose answer goes on after an event. Raises InvalidRequest where it would be another answer.

    `own` is the digest of its fingerprint and request, where its events have ids; `context` the most tokens of the model.
    """
    given, received, most = command.sampling.seed, len(command.resume_token_ids), command.stops.max_tokens
    most = context if most is None else most
    wrong = None
    if not stream:
        wrong = "resumes a stream, and this request has no stream: true"
    elif command.num_answers > 1:
        wrong = f"resumes a stream of one answer, and this request asks for {command.num_answers}"
    elif given is not None and given != place.seed:
        wrong = f"belongs to an answer with the seed {place.seed}, and this request has the seed {given}"
    elif not received <= place.shown_prefix.num_tokens <= most:
        wrong = (
            f"must be after {received} to {most} tokens, by resume_token_ids and max_tokens; got "
            f"{place.shown_prefix.num_tokens}"
        )
    elif place.digest != own:
        which = f"to another request, or to another system_fingerprint than {fingerprint}, which serves now"
        wrong = f"belongs {which}: send the same request, or ask without it"
    if wrong is not None:
        raise InvalidRequest(f"{HEADER} {wrong}", HEADER)
    return replace(command, sampling=replace(command.sampling, seed=place.seed), shown_prefix=place.shown_prefix)


def refuse_header(values: Sequence[str]) -> None:
    """Raise InvalidRequest where the header comes to a route whose events have no ids."""
    if any(values):
        raise InvalidRequest(f"{HEADER} resumes streams of /v1/completions, and not of a chat", HEADER)


_USUAL: tuple[SamplingParams | StopRules | DecodingParams, ...] = (SamplingParams(), StopRules(), NO_CHANGE)
_FIELDS = [
    (place, each.name, getattr(usual, each.name))
    for place, usual in enumerate(_USUAL)
    for each in fields(usual)
    if each.compare and each.name not in ("seed", "allowed_token_ids")
]


def digests_of(command: Command) -> tuple[bytes, int]:
    """Of the request, and of the tokens that the caller sent of the answer. Of long ones they take tens of milliseconds."""
    return request_digest(command), digest_of(command.resume_token_ids)


def request_digest(command: Command) -> bytes:
    """Of what an answer's tokens and text depend on in its request, but for the seed. Of a long one it takes milliseconds.

    What has its default does not count, so that a version with one field more has the same digests.
    """
    records = command.sampling, command.stops, command.decoding
    facts = [(name, value) for at, name, usual in _FIELDS if (value := getattr(records[at], name)) != usual]
    shape = command.grammar, command.echo, command.truncate_prompt_tokens, command.skip_special_tokens
    made = hashlib.sha256(repr((facts, shape)).encode())
    for value in (*command.prompts, command.suffix, command.decoding.allowed_token_ids):
        assert isinstance(value, str | tuple)
        made.update(b"\0%d " % len(value))
        for at in range(0, len(value), PART):
            made.update(_bytes(value[at : at + PART]))
    return made.digest()


def _bytes(part: str | tuple[int, ...]) -> bytes:
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    try:
        return array("q", part).tobytes()
    except OverflowError:
        return repr(part).encode()  # ids that no model has


def digest(fingerprint: str, request: bytes) -> str:
    """Tells fingerprints and requests apart, in few characters. `request` is a `request_digest`."""
    return hashlib.sha256(fingerprint.encode() + request).hexdigest()[:DIGITS]


def _hex(number: int) -> bytes:
    return format(number, "x").encode()
