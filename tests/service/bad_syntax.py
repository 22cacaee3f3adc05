"""Rows that are wrong before their values are looked at: encoding, JSON, types, headers and paths, and bytes on the wire."""

import math
import struct

from tests.service.bad_calls import CHAT, COMPLETIONS, DETOKENIZE, JSON, TOKENIZE
from tests.service.bad_rows import UNSUPPORTED, completion, gone, grpc, headed, http

ENCODING = [
    http("encoding: UTF-8 cut in the middle", b'{"prompt": "\xf0\x9f\x98"}', None, "UTF-8"),
    http("encoding: Latin-1", '{"prompt": "café"}'.encode("latin-1"), None, "UTF-8"),
    http("encoding: UTF-16", '{"prompt": "a"}'.encode("utf-16"), None, "UTF-8"),
    http("encoding: a byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', None, "byte order mark"),
    http("encoding: half a pair, escaped", b'{"prompt": "a\\udfffb"}', "prompt", "surrogate"),
    http("encoding: half a pair in a field's name", b'{"prompt": "a", "\\uda00": 1}', None, "surrogate"),
    http(
        "encoding: half a pair in a message",
        b'{"messages": [{"role": "user", "content": "\\ud801"}]}',
        "messages",
        "surrogate",
        path=CHAT,
    ),
    http("encoding: half a pair to be tokenized", b'{"prompt": "\\ud9ff"}', "prompt", "surrogate", path=TOKENIZE),
]
STRUCTURE = [
    http("json: no body", b"", None, "not valid JSON"),
    http("json: blanks alone", b"\r\n\t ", None, "not valid JSON"),
    http("json: null", b"null", None, "object"),
    http("json: cut in a string", b'{"prompt": "abc', None, "not valid JSON"),
    http("json: a comma too many", b'{"prompt": "a", }', None, "not valid JSON"),
    http("json: Python's spelling", b"{'prompt': None}", None, "not valid JSON"),
    http("json: a field twice", b'{"prompt": "a", "top_k": 1, "top_k": 1}', "top_k", "duplicate key 'top_k'"),
    http(
        "json: a key twice inside a field",
        b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}',
        "1",
        "duplicate key '1'",
    ),
    http("json: 129 levels", b'{"prompt": ' + b"[" * 128 + b"]" * 128 + b"}", None, "deeper than 128 levels"),
    http("json: half a million brackets", b"[" * 500_000, None, "deeper than 128"),
    http("json: fifty thousand fields", {f"f{i}": 0 for i in range(50_000)}, "f64", "f64 is not a field"),
]
TYPES = [
    completion("types: a float for max_tokens", {"max_tokens": 8.0}, "max_tokens", "integer"),
    completion("types: a string for max_tokens", {"max_tokens": "8"}, "max_tokens", "integer"),
    completion("types: a string for temperature", {"temperature": "hot"}, "temperature", "number"),
    completion("types: a number for stream", {"stream": 1}, "stream", "boolean"),
    completion("types: a string in stop_token_ids", {"stop_token_ids": ["7"]}, "stop_token_ids", "integer"),
    completion("types: a field of another route", {"messages": []}, "messages", "/v1/chat/completions", UNSUPPORTED),
    completion("types: another server's sampling", {"typical_p": 0.5}, "typical_p", "not supported", UNSUPPORTED),
    completion("types: an invented field", {"temprature": 1}, "temprature", "not a field"),
    completion(
        "types: a mistyped option of a stream",
        {"stream": True, "stream_options": {"includeusage": True}},
        "stream_options.includeusage",
        "not a field of this request: did you mean include_usage?",
    ),
    completion("types: an object for the prompt", {"prompt": {"text": "a"}}, "prompt", "string"),
    completion("types: strings and ids in one prompt", {"prompt": ["a", 5]}, "prompt", "string"),
    http("types: a boolean among the tokens", {"tokens": [1, True]}, "tokens", "integer", path=DETOKENIZE),
]
HEADERS = [
    headed("headers: no content type", {}, "Content-Type"),
    headed("headers: a form", {"content-type": "application/x-www-form-urlencoded"}, "Content-Type"),
    headed("headers: UTF-16", {"content-type": "application/json; charset=utf-16"}, "UTF-8"),
    headed("headers: Brotli", JSON | {"content-encoding": "br"}, "Content-Encoding"),
    gone("paths: GET of a POST route", "GET", COMPLETIONS, "Method Not Allowed", "method_not_allowed"),
    gone("paths: DELETE of the models", "DELETE", "/v1/models", "Method Not Allowed", "method_not_allowed"),
    gone("paths: unknown", "POST", "/v1/images", "Not Found", "not_found"),
    http(
        "paths: an unknown model",
        b"",
        "model",
        "does not exist",
        "model_not_found",
        method="GET",
        path="/v1/models/no-such-model",
    ),
]
WIRE = [
    grpc("wire: no message", b"\xff\xff\xff", "not a valid GenerateRequest"),
    grpc("wire: cut", b"\x1a\x05abc", "not a valid GenerateRequest"),
    grpc("wire: a length of 2^63", b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "not a valid GenerateRequest"),
    grpc("wire: text that is not UTF-8", b"\x1a\x02\xc3\x28", "not a valid GenerateRequest"),
    grpc("wire: a group that does not end", b"\x1a\x01a\x1b", "not a valid GenerateRequest"),
    grpc("wire: cut in a stream", b"\x1a\x05abc", "not a valid GenerateRequest", rpc="GenerateStream"),
    grpc("wire: no text to tokenize", b"\x12\x01\xff", "not a valid TokenizeRequest", rpc="Tokenize"),
    grpc("wire: no tokens to detokenize", b"\x12\x01\x80", "not a valid DetokenizeRequest", rpc="Detokenize"),
    grpc("wire: JSON", b'{"text": "a"}', "not a valid GenerateRequest"),
    grpc("wire: fields of a later version alone", b"\x9a\x06\x01a", "input is required"),
    grpc("wire: a temperature that is no number", b"\x1a\x01a\x31" + struct.pack("<d", math.nan), "temperature"),
    grpc("wire: a count of 64 set bits", b"\x1a\x01a\x28" + b"\xff" * 9 + b"\x01", "max_tokens"),
]
