"""Rows of the table of what is refused (`refused.py`): encoding, JSON, headers and paths, bytes on the wire, API keys."""

import math
import struct

from tests.service.bad_calls import CHAT, COMPLETIONS, JSON, TOKENIZE
from tests.service.refused import GOOD, KEY, SECRET, A, Row, grpc, http

TYPE = "unsupported_media_type"


def keyless(value: str | None, word: str) -> Row:
    """A good call whose Authorization is not good, on both transports."""
    headers = {} if value is None else {"authorization": value}
    return http(A, None, word, KEY, headers=JSON | headers, metadata=tuple(headers.items()), message=GOOD, keyed=True)


ENCODING = [
    http(b'{"prompt": "\xf0\x9f\x98"}', None, "UTF-8"),
    http('{"prompt": "café"}'.encode("latin-1"), None, "UTF-8"),
    http('{"prompt": "a"}'.encode("utf-16"), None, "UTF-8"),
    http(b'\xef\xbb\xbf{"prompt": "a"}', None, "byte order mark"),
    http(b'{"prompt": "a\\udfffb"}', "prompt", "surrogate"),
    http(b'{"prompt": "a", "\\uda00": 1}', None, "surrogate"),
    http(
        b'{"messages": [{"role": "user", "content": "\\ud801"}]}',
        "messages",
        "surrogate",
        path=CHAT,
    ),
    http(b'{"prompt": "\\ud9ff"}', "prompt", "surrogate", path=TOKENIZE),
]
STRUCTURE = [
    http(b"", None, "not valid JSON"),
    http(b"\r\n\t ", None, "not valid JSON"),
    http(b"null", None, "object"),
    http(b'{"prompt": "abc', None, "not valid JSON"),
    http(b'{"prompt": "a", }', None, "not valid JSON"),
    http(b"{'prompt': None}", None, "not valid JSON"),
    http(b'{"prompt": "a", "top_k": 1, "top_k": 1}', "top_k", "duplicate key 'top_k'"),
    http(
        b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}',
        "logit_bias",
        "duplicate key '1'",
    ),
    http(b'{"prompt": ' + b"[" * 128 + b"]" * 128 + b"}", "prompt", "128 levels, at prompt[0][0]"),
    http(b"[" * 500_000, None, "deeper than 128"),
    http({f"f{i}": 0 for i in range(50_000)}, "f64", "f64 is not a field"),
]
HEADERS = [
    http(A, None, "Content-Type", TYPE, headers={}),
    http(A, None, "Content-Type", TYPE, headers={"content-type": "application/x-www-form-urlencoded"}),
    http(A, None, "UTF-8", TYPE, headers={"content-type": "application/json; charset=utf-16"}),
    http(A, None, "Content-Encoding", TYPE, headers=JSON | {"content-encoding": "br"}),
    http(b"", None, "Method Not Allowed", "method_not_allowed", COMPLETIONS, method="GET"),
    http(b"", None, "Method Not Allowed", "method_not_allowed", "/v1/models", method="DELETE"),
    http(b"", None, "Not Found", "not_found", "/v1/images", method="POST"),
]
WIRE = [
    grpc(b"\xff\xff\xff", "not a valid GenerateRequest"),
    grpc(b"\x1a\x05abc", "not a valid GenerateRequest"),
    grpc(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "not a valid GenerateRequest"),
    grpc(b"\x1a\x02\xc3\x28", "not a valid GenerateRequest"),
    grpc(b"\x1a\x01a\x1b", "not a valid GenerateRequest"),
    grpc(b"\x1a\x05abc", "not a valid GenerateRequest", rpc="GenerateStream"),
    grpc(b"\x12\x01\xff", "not a valid TokenizeRequest", rpc="Tokenize"),
    grpc(b"\x12\x01\x80", "not a valid DetokenizeRequest", rpc="Detokenize"),
    grpc(b'{"text": "a"}', "not a valid GenerateRequest"),
    grpc(b"\x9a\x06\x01a", "input is required"),
    grpc(b"\x1a\x01a\x31" + struct.pack("<d", math.nan), "temperature"),
    grpc(b"\x1a\x01a\x28" + b"\xff" * 9 + b"\x01", "max_tokens"),
]
KEYS = [
    keyless(None, "needs an API key"),
    keyless("Basic YTpi", "needs an API key"),
    keyless("Bearer att_of-somebody-else", "not known"),
    http(b"", None, "needs an API key", KEY, "/v1/models", method="GET", keyed=True),
    http(A, None, "needs an API key", KEY, f"{COMPLETIONS}?api_key={SECRET}", keyed=True),
    http(
        *(A, None, "in Authorization and that in x-api-key are not known", KEY),
        headers=JSON | {"authorization": f"Bearer {SECRET}y", "x-api-key": f"{SECRET}x"},
        keyed=True,
    ),
    grpc(GOOD, "there is more than one", KEY, metadata=(("authorization", f"Bearer {SECRET}"),) * 2, keyed=True),
    grpc(b"", "needs an API key", KEY, rpc="Tokenize", keyed=True),
    grpc(b"\xff", "needs an API key", KEY, rpc="GenerateStream", keyed=True),
]
ROWS = (*ENCODING, *STRUCTURE, *HEADERS, *WIRE, *KEYS)
