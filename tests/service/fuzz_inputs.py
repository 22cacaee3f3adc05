"""Inputs that nobody meant: valid bodies and messages, changed as bytes.

Bodies of any values are schemathesis's: `http_api/test_schemathesis.py`. Grammars are left out, as each new one starts a
process; `test_fuzz.py` has them on their own.
"""

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from hypothesis import strategies as st

from attend.v1 import generation_pb2 as pb
from tests.service.bad_calls import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE

Change = Callable[[bytes], bytes]

COMPLETION: dict[str, Any] = {
    **{"prompt": "abc", "max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["xyz"]},
    **{"logprobs": 2, "logit_bias": {"5": 1.5}, "stream": True, "stream_options": {"include_usage": True}, "user": "é😀"},
}
CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": [{"type": "text", "text": "naïve 😀"}], "name": "ann"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "4", "tool_call_id": "t"},
    ],
    **{"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 1},
}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, COMPLETION),
    (COMPLETIONS, {"prompt": [[97, 98], [99]], "max_tokens": 2, "echo": True, "prompt_logprobs": 1, "min_tokens": 1}),
    (COMPLETIONS, {"prompt": ["a", "b"], "best_of": 1, "deadline_ms": 60000, "cache_salt": "s", "bad_words": ["no"]}),
    (COMPLETIONS, {"prompt": [97], "resume_token_ids": [98], "allowed_token_ids": [99], "stop_token_ids": [100]}),
    (CHAT, CONVERSATION),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True, "chat_template_kwargs": {}}),
    (TOKENIZE, {"prompt": "naïve", "add_special_tokens": False, "return_token_strs": True}),
    (DETOKENIZE, {"tokens": [97, 98], "model": "fake"}),
)
PIECES = (
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xef\xbb\xbf", b"\0", b"\x1f", b"\\ud800"),
    *(b"\\", b'"', b"{", b"}", b"[", b"]", b",", b":", b"{}", b"[[[[[[[[" * 5, b"null", b"NaN", b"1e9999", b"9" * 450, b"//"),
    *(b'"a":1,', b'"n":1,"n":1', b"\r\n", b" " * 1000, b"\xe2\x80\xa8", b"\xc2\xa0", b"-", b".", b"e5", b"\\u0000"),
)
_place = st.integers(0, 2**16)


def _flip(place: int, bit: int) -> Change:
    return lambda data: _with(data, place, bytes([data[place % len(data)] ^ 1 << bit]), 1) if data else data


def _insert(place: int, piece: bytes) -> Change:
    return lambda data: _with(data, place, piece, 0)


def _cut(place: int, size: int) -> Change:
    return lambda data: _with(data, place, b"", size)


def _double(place: int, size: int) -> Change:
    return lambda data: _with(data, place, data[place % (len(data) + 1) :][:size], 0)


def _with(data: bytes, place: int, piece: bytes, gone: int) -> bytes:
    """`data` with `gone` bytes from `place` on (modulo its length) replaced."""
    start = place % len(data) if gone and data else place % (len(data) + 1)
    return data[:start] + piece + data[start + gone :]


byte_changes = st.one_of(
    st.builds(_flip, _place, st.integers(0, 7)),
    st.builds(_insert, _place, st.sampled_from(PIECES) | st.binary(max_size=4)),
    st.builds(_cut, _place, st.integers(1, 8) | st.just(2**20)),
    st.builds(_double, _place, st.integers(1, 60)),
)


@st.composite
def byte_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """(path, body): the bytes of a valid body, damaged, or in another encoding."""
    path, document = draw(st.sampled_from(BODIES))
    text = json.dumps(document, ensure_ascii=draw(st.booleans()))
    data = text.encode(draw(st.sampled_from(("utf-8",) * 8 + ("utf-8-sig", "utf-16", "utf-32-le", "utf-7"))))
    for change in draw(st.lists(byte_changes, min_size=1, max_size=3)):
        data = change(data)
    return path, data


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


WIRE = (
    *(_tag(number, kind) for number in (1, 5, 7, 10, 99, 536870911) for kind in range(8)),
    *(_tag(number, 0) + _varint(2**64 - 1) for number in (5, 11, 13)),
    *(_tag(number, 2) + _varint(size) for number in (3, 4, 7, 14) for size in (1, 200, 2**31, 2**63)),
    *(_tag(7, 2) + b"\x0a" + b"\xff" * 10, _tag(5, 0) + b"\xff" * 11, _tag(3, 2) + b"\x02\xc3\x28", _tag(0, 0) + b"\0"),
    *(
        _tag(99, 3) * 200,
        _tag(99, 3) + _tag(99, 4),
        _tag(99, 4),
        b"\x80" * 20,
        _tag(6, 1) + b"\x00\x00\x00\x00\x00\x00\xf8\x7f",
    ),
)
"""Pieces of the wire format: every wire type, endless numbers, lengths that lie, groups, no UTF-8."""


def _request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


MESSAGES: tuple[tuple[str, Message], ...] = (
    (
        "Generate",
        _request(text="naïve 😀", max_tokens=4, temperature=0.5, sampling={"n": 2, "top_k": 3, "top_p": 0.5, "seed": -1}),
    ),
    (
        "GenerateStream",
        _request(token_ids={"ids": [97, 98, 256]}, response={"logprobs": True, "top_logprobs": 2, "echo": True}),
    ),
    (
        "Generate",
        _request(text="a", stopping={"stop_strings": ["x", "yz"], "stop_token_ids": [7], "min_tokens": 2}, cache_salt="s"),
    ),
    (
        "GenerateStream",
        _request(text="a", decoding={"logit_bias": {5: 1.0}, "bad_words": ["x"]}, resume_token_ids={"ids": [98]}),
    ),
    (
        "Generate",
        _request(text="abc", model="fake", request_id="id", deadline_ms=60000, truncate_prompt_tokens=2, max_tokens=3),
    ),
    (
        "Chat",
        pb.ChatRequest(
            messages=[{"role": "user", "content": "naïve"}, {"role": "assistant", "tool_calls": [{"id": "1", "name": "f"}]}],
            tools=[{"name": "f", "parameters": '{"type": "object"}', "strict": True}],
            tool_choice="none",
            max_tokens=3,
        ),
    ),
    ("ChatStream", pb.ChatRequest(messages=[{"role": "user", "content": "a"}], chat_template_kwargs="{}", max_tokens=3)),
    ("Tokenize", pb.TokenizeRequest(model="fake", text="naïve", add_special_tokens=False)),
    ("Embed", pb.EmbedRequest(model="fake", inputs=[{"text": "naïve"}, {"token_ids": {"ids": [97]}}], dimensions=3)),
    ("Detokenize", pb.DetokenizeRequest(model="fake", token_ids=[97, 256])),
)
wire_changes = st.one_of(
    byte_changes,
    st.builds(_insert, _place, st.sampled_from(WIRE)),
    st.builds(lambda piece: lambda data: data + piece, st.sampled_from(WIRE)),
)


@st.composite
def byte_messages(draw: st.DrawFn) -> tuple[str, bytes]:
    """(method, bytes): those of a valid message, damaged."""
    method, message = draw(st.sampled_from(MESSAGES))
    data = message.SerializeToString()
    for change in draw(st.lists(wire_changes, min_size=1, max_size=3)):
        data = change(data)
    return method, data
