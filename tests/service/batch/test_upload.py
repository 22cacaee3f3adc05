"""A form is read as it comes, in pieces of any size, and what no client writes is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.errors import InvalidRequest
from attend.service.batch.upload import MAX_FIELD_BYTES, MAX_FIELDS, MAX_HEAD_BYTES, Form, boundary_of
from tests.conftest import examples

EDGE = b"xyz"


def form(*parts: tuple[str, bytes], boundary: bytes = EDGE, name: str = "l.jsonl") -> bytes:
    body = b""
    for field, content in parts:
        more = f'; filename="{name}"' if field == "file" else ""
        body += b"--" + boundary + f'\r\nContent-Disposition: form-data; name="{field}"{more}\r\n\r\n'.encode()
        body += content + b"\r\n"
    return body + b"--" + boundary + b"--\r\n"


def fed(body: bytes, sizes: list[int] | None = None) -> tuple[Form, bytes]:
    found: list[bytes] = []
    read, place = Form(EDGE, found.append), 0
    for size in [*(sizes or []), len(body)]:
        read.feed(body[place : place + size])
        place += size
    read.end()
    return read, b"".join(found)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(
    st.lists(st.sampled_from([b"\r\n", b"--", b"-", b"xyz", b"\r", b"a", b"\r\n--xy", b"\0\xff"]), max_size=30),
    st.lists(st.integers(0, 9), max_size=60),
)
def test_a_file_is_what_was_sent_however_it_is_cut(parts, sizes):
    content = b"".join(parts)
    body = form(("purpose", b"batch"), ("file", content))
    if b"\r\n--xyz" in content:
        return  # a client would have chosen another boundary
    read, found = fed(body, sizes)
    assert (found, read.fields, read.filename) == (content, {"purpose": "batch"}, "l.jsonl")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "its last boundary is missing"),
        (b"--xyZ\r\n", "is not multipart/form-data"),
        (form(("purpose", b"batch"))[:-4], "its last boundary is missing"),
        (form(("purpose", b"batch")), "file is required"),
        (form(("file", b"1"), ("file", b"2")), "'file' is in the form twice"),
        (form(("purpose", b"a"), ("purpose", b"b")), "'purpose' is in the form twice"),
        (form(("purpose", b"a" * (MAX_FIELD_BYTES + 1))), f"purpose must be at most {MAX_FIELD_BYTES} bytes"),
        (form(*((f"f{n}", b"") for n in range(MAX_FIELDS + 2))), f"at most {MAX_FIELDS} fields"),
        (b"--xyz\r\n" + b"a" * (MAX_HEAD_BYTES + 10), "Maximum header size"),
        (b"--xyz" + b"\r\na: b" * 20 + b"\r\n\r\nx\r\n--xyz--", "Maximum header count"),
        (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n--xyz--", "Content-Disposition"),
        (b'--xyz\r\nContent-Disposition: form-data; name=""\r\n\r\nx\r\n--xyz--', "Content-Disposition"),
        (b'--xyz\r\nContent-Disposition: attachment; name="file"\r\n\r\nx\r\n--xyz--', "Content-Disposition"),
        (b'--xyz\r\nContent-Disposition : form-data; name="file"\r\n\r\nx\r\n--xyz--', "multipart/form-data"),
    ],
)
def test_what_is_no_form_is_refused_in_a_sentence(body, words):
    with pytest.raises(InvalidRequest, match=words):
        fed(body)


@pytest.mark.parametrize(
    ("header", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('multipart/form-data; boundary="a b"', b"a b"),
        ("multipart/form-data; charset=utf-8; Boundary=----WebKit1", b"----WebKit1"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        (f"multipart/form-data; boundary={'a' * 71}", None),
        ('multipart/form-data; boundary="a\\r"', None),
        ("multipart/form-data; boundary=ä", None),
    ],
)
def test_the_boundary_is_the_headers(header, boundary):
    if boundary is None:
        with pytest.raises(InvalidRequest, match="boundary"):
            boundary_of(header)
    else:
        assert boundary_of(header) == boundary
