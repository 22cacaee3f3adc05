"""A body is strict JSON, bounded in size and depth, and what is wrong with it is said in a sentence, quickly."""

import gzip
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.errors import InvalidRequest
from attend.service.chat.messages import MAX_DEPTH
from attend.service.grpc_api import server as grpc_server
from attend.service.http_api import answering, body, routes
from attend.service.http_api.body import INLINE_BYTES, MAX_BYTES, MAX_PARTS, parse_json
from attend.v1 import generation_pb2 as pb
from tests.conftest import examples
from tests.fakes import FakeEngine, build_server, info

JSON = {"content-type": "application/json"}
scalars = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
trees = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(st.dictionaries(texts, trees, max_size=5), st.booleans())
def test_whatever_json_can_say_is_read_back(document, ascii_only):
    assert parse_json(json.dumps(document, ensure_ascii=ascii_only).encode()) == document


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(st.binary(max_size=40) | st.text('{}[]":,\\u0d8 1eE-', max_size=40).map(str.encode))
def test_any_other_bytes_are_refused_in_a_sentence_and_never_crash(data):
    document, refusal = None, ""
    try:
        document = parse_json(data)
    except InvalidRequest as error:
        refusal = str(error)
    assert document == json.loads(data) if not refusal else len(refusal) < 200 and "\n" not in refusal


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"42", "must be a JSON object"),
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": "\n"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
        (b'{"b": {"a": 1, "c": 2, "a": 3}}', "duplicate key 'a'"),
        (b'{"a": 1, "\\u0061": 1}', "duplicate key 'a'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "out of range"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": ["b", {"c": "\\udfff"}]}', "lone surrogate"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b'{"a": "\\ude00\\ud83d"}', "lone surrogate"),
    ],
)
def test_what_is_not_strict_json_is_refused_with_the_reason(body, words):
    with pytest.raises(InvalidRequest) as caught:
        parse_json(body)
    assert words in str(caught.value)


def test_a_duplicate_key_is_the_field_of_its_error():
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"seed": 1, "n": 2, "seed": 3}')
    assert caught.value.field == "seed"
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"n": 1, "logit_bias": {"1": 1, "1": 2}}')
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": "\\u0000"}', "\0"),
        (b'{"a": "\\ud83d\\ude00"}', "😀"),
        ('{"a": "😀"}'.encode(), "😀"),
        (b'{"a": 9007199254740993}', 2**53 + 1),
        (b'{"a": ' + b"9" * 400 + b"}", int("9" * 400)),
        (b'{"a": -0.0}', 0.0),
        (b'{"a": 1e-999}', 0.0),
        (b'{"a": 1e2}', 100.0),
        (b'\r\n\t {"a": ""} \n', ""),
    ],
)
def test_what_json_allows_is_read_as_it_is(body, value):
    assert parse_json(body) == {"a": value}


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return b'{"a":' + opening * (depth - 1) + b"1" + closing * (depth - 1) + b"}"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"k":', b"}")])
def test_so_many_levels_are_read_and_one_more_is_not(opening, closing):
    assert "a" in parse_json(nested(MAX_DEPTH, opening, closing))
    with pytest.raises(InvalidRequest, match=f"deeper than {MAX_DEPTH}"):
        parse_json(nested(MAX_DEPTH + 1, opening, closing))


def test_a_body_that_is_too_deep_is_refused_with_the_place():
    deep: object = {}
    for _ in range(50):
        deep = {"type": "array", "items": {"type": "object", "properties": {"a,b[": deep}}}
    tools = [{"type": "x", "n": [1, 2]}, {"function": {"parameters": deep}}]
    with pytest.raises(InvalidRequest) as caught:
        parse_json(json.dumps({"prompt": [1, 2, [3]], "tools": tools}).encode())
    assert caught.value.field == "tools"
    assert "128 levels, at tools[1].function.parameters.items.properties.a,b[.items.properties.a,b[." in str(caught.value)
    with pytest.raises(InvalidRequest, match=r"at a\[0\]\[1\]\[0\]\[0\]"):
        parse_json(b'{"a": [[[5, ","], [' + b"[" * 199)


@pytest.mark.parametrize("body", [nested(100_000, b"[", b"]"), b"[" * MAX_BYTES, b'{"a":' * 200_000, b'{"":[' * 200_000])
def test_depth_is_refused_before_anything_recurses(body):
    with pytest.raises(InvalidRequest, match=f"deeper than {MAX_DEPTH}"):
        parse_json(body)


@pytest.mark.parametrize("text", ["[" * 100, '\\"[{' * 100, "]" * 100 + "[" * 100, "\\\\", '\\\\\\"' + "[" * 50])
def test_brackets_inside_strings_do_not_count(text):
    body = b'{"a": "' + text.encode() + b'", "b": [1]}'
    assert parse_json(body) == json.loads(body)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "unit",
    [b'"', b"\\", b'\\"', b'"\\', b"a", b'a"', b'""', b'","', b"\\\\", b"\\u0041", b" ", b"1", b"-", b"1e", b"]", b"}[", b":"],
)
@pytest.mark.parametrize("start", [b"", b'{"a": "', b'{"a": '])
def test_the_time_to_refuse_a_mebibyte_does_not_grow_with_its_square(start, unit):
    """Quadratic reading of one of these takes minutes; the time-out is all that measures."""
    body = start + unit * (MAX_BYTES // len(unit))
    with pytest.raises(InvalidRequest):
        parse_json(body)


@pytest.mark.timeout(20)
def test_many_keys_of_which_the_last_stands_twice_are_refused_in_time():
    keys = [f'"{number:x}":1' for number in range(60_000)]
    with pytest.raises(InvalidRequest, match="duplicate key 'last'"):
        parse_json(("{" + ",".join([*keys, '"last":1', '"last":2']) + "}").encode())


def padded(size: int) -> bytes:
    body = b'{"prompt":"a","max_tokens":1}'
    return body + b" " * (size - len(body))


def test_a_whole_context_of_token_ids_fits_into_a_body_of_either_transport():
    """262,144 ids, as of a vocabulary of six digits."""
    context = 1 << 18
    server = build_server(FakeEngine(info=info(max_model_len=context + 1, vocab_size=10**6, num_blocks=context)))
    sent = b'{"max_tokens": 1, "prompt": [%s]}' % b", ".join([b"123456"] * context)
    answer = server.post(sent)
    assert (answer.status_code, answer.json()["usage"]["prompt_tokens"]) == (200, context)
    too_long = server.post(sent + b" " * (16 * (context + 1) + 1 - len(sent)))
    assert (too_long.status_code, f"at most {16 * (context + 1)} bytes" in too_long.text) == (413, True)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[123456] * context), max_tokens=1)
    assert message.ByteSize() <= grpc_server.most_bytes(context)


def test_the_limit_holds_without_a_content_length_and_against_a_false_one():
    async def pieces(size):
        for start in range(0, size, 1 << 16):
            yield padded(size)[start : start + (1 << 16)]

    for size, status in ((MAX_BYTES, 200), (MAX_BYTES + 1, 413)):
        assert build_server().post(pieces(size)).status_code == status
    assert build_server().post(b"{}", headers={"content-length": str(MAX_BYTES + 1)}).status_code == 413
    assert build_server().post(padded(MAX_BYTES + 1), headers={"content-length": "2"}).status_code == 413


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/json;charset=UTF-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
def test_only_json_is_taken_for_json(kind, status):
    answer = build_server().post(padded(40), headers={"content-type": kind})
    assert answer.status_code == status
    if status == 415:
        assert "Content-Type" in answer.json()["error"]["message"]


def test_a_gzip_body_is_read_as_if_it_were_not():
    for size in (40, 100_000):
        answer = build_server().post(gzip.compress(padded(size)), headers={"content-encoding": "gzip"})
        assert answer.status_code == 200, answer.text


def test_a_gzip_body_is_bounded_by_what_it_becomes():
    bomb = gzip.compress(b" " * (64 << 20))
    answer = build_server().post(bomb, headers={"content-encoding": "gzip"})
    assert (answer.status_code, "decompressed" in answer.text) == (413, True)
    small = gzip.compress(padded(MAX_BYTES))
    assert build_server().post(small, headers={"content-encoding": "gzip"}).status_code == 200


ZIPPED = gzip.compress(padded(40), mtime=0)  # with a time it would have another name in each worker


@pytest.mark.parametrize("body", [b"", b"{}", ZIPPED[:-9], ZIPPED + b"x"], ids=["nothing", "JSON", "cut", "more"])
def test_what_is_no_gzip_is_refused(body):
    answer = build_server().post(body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, "no gzip" in answer.text) == (400, True)


@pytest.mark.parametrize("coding", ["br", "deflate", "zstd", "gzip, identity"])
def test_a_compressed_body_is_refused_unread(coding):
    answer = build_server().post(b"\x1f\x8b", headers={"content-encoding": coding})
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert build_server().post(padded(40), headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("size", [INLINE_BYTES, INLINE_BYTES + 1])
def test_a_long_body_is_read_beside_the_event_loop_all_the_way_to_what_it_asks_for(monkeypatch, size):
    threads = []
    for place, name in ((body, "parse_json"), (routes.CompletionRequest, "read"), (answering, "to_command")):
        genuine = getattr(place, name)
        note = lambda *args, genuine=genuine, **more: threads.append(threading.current_thread()) or genuine(*args, **more)  # noqa: E731
        monkeypatch.setattr(place, name, note)
    assert build_server().post(padded(size)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [size == INLINE_BYTES] * 3


@pytest.mark.parametrize("part", [b"{}", b"[]", b'""', b'{"a":"b"}'])
def test_a_body_of_half_a_million_parts_is_refused_before_it_is_parsed(part, monkeypatch):
    data = b'{"prompt":[' + b",".join([part] * ((MAX_BYTES - 20) // (len(part) + 1))) + b"]}"
    monkeypatch.setattr(body.json, "loads", None)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_PARTS} strings and brackets"):
        parse_json(data)


def test_two_thousand_messages_and_a_text_full_of_quotes_are_read():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 2000
    document = {"messages": messages, "prompt": '"{}[],' * 60_000}
    assert parse_json(json.dumps(document).encode()) == document
