"""What both HTTP clients share: request bodies, server-sent events, and errors of the server."""

import json
from collections.abc import Iterator, Mapping
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any

from attend.service.client.errors import InvalidRequest
from attend.service.client.retry import Call, Delta, TryFailed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SILENT_SECONDS = 45.0
"""A stream that has begun and sends nothing for so long is broken: the server sends a comment every 15 s."""
AGAIN = (408, 429, 502, 503, 504)
"""The statuses after which the same request may fare better, unless the server says that it will not: 502 and 504 are a proxy's
whose backend died. So is a 500 that is not the server's own."""
AGAIN_LATER = ("shutting_down", "queue_full", "rate_limit_exceeded")
"""The codes of such errors in a stream whose status was sent before."""
MOST_ERROR_BYTES = 64 << 10


def check_fields(fields: Mapping[str, Any], typed_dict: type) -> dict[str, Any]:
    """The fields that are given. Raises InvalidRequest for one that this client does not send, such as `n`."""
    for name in fields.keys() - typed_dict.__annotations__.keys():
        raise InvalidRequest(f"{name} is not supported by this client: its streams have one answer, which can be resumed", name)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise InvalidRequest(
            "prompt must be one string or one list of token ids: a stream of several prompts cannot be resumed", "prompt"
        )
    return {name: value for name, value in fields.items() if value is not None}


def body_of(fields: Mapping[str, Any], call: Call) -> bytes:
    """The body of the next try: the same request, the same seed, and the tokens that have come."""
    own: dict[str, Any] = {"stream": True, "return_token_ids": True, "seed": call.seed}
    if "messages" not in fields and call.received_tokens:
        own["resume_token_ids"] = call.received_tokens
    return json.dumps({**fields, **own}).encode()


def headers_of(key: str | None) -> dict[str, str]:
    """The HTTP headers of each try."""
    own = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return own | ({"Authorization": f"Bearer {key}"} if key else {})


class Events:
    """The deltas of a stream from its bytes, however they are cut."""

    def __init__(self) -> None:
        self.done = False
        """Whether `[DONE]` has come."""
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The deltas that these bytes complete. Raises TryFailed for an event that is an error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.rstrip() == b"data: [DONE]":
                self.done = True
            elif line.startswith(b"data:"):
                yield from _deltas(line[5:])


def _deltas(data: bytes) -> list[Delta]:
    try:
        event = json.loads(data)
        if "error" in event:
            code = event["error"]["code"]
            raise TryFailed(event["error"]["message"], again=code in AGAIN_LATER, code=code)
        return [_delta(choice, event["system_fingerprint"]) for choice in event["choices"]]
    except (ValueError, LookupError, TypeError) as error:
        raise TryFailed(f"an event of another shape: {data[:200]!r}", again=True) from error


def _delta(choice: dict[str, Any], fingerprint: str) -> Delta:
    text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return Delta(text, tuple(choice.get("token_ids", ())), fingerprint, choice["finish_reason"], choice["stop_reason"])


def refused_call(status: int, headers: Mapping[str, str] | Message, body: bytes) -> TryFailed:
    """An answer other than 200. Some come from a proxy, in a shape of its own."""
    try:
        error = json.loads(body)["error"]
        message, code, again = str(error["message"]), str(error["code"]), status in AGAIN
    except (ValueError, LookupError, TypeError):
        message, code, again = body[:200].decode(errors="replace"), str(status), status in (500, *AGAIN)
    again = again and headers.get("x-should-retry") != "false"
    return TryFailed(f"HTTP {status}: {message}", again=again, after=retry_after(headers), code=code)


def retry_after(headers: Mapping[str, str] | Message) -> float:
    """Seconds that the server asks to wait: a number, or a date beside the answer's own; 0 where it names none."""
    value = headers.get("Retry-After", "")
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        return max(0.0, (parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds())
    except (ValueError, TypeError):
        return 0.0
