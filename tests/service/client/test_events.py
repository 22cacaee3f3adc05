"""What the clients send again, and after which errors."""

import json
from types import SimpleNamespace

import grpc
import pytest

from attend.model.errors import DeadlineExceeded, EngineFailed, InvalidRequest, QueueFull, RateLimited, Unavailable
from attend.service.client.errors import Refused
from attend.service.client.events import Events, body_of, refused_call
from attend.service.client.grpc import failed_try
from attend.service.client.retry import Call, Means, Policy, TryFailed
from attend.service.errors import AnswerChanged
from attend.service.http_api.problems import error_body, error_response


@pytest.mark.parametrize(
    ("fields", "received", "resumed"),
    [
        ({"prompt": "a"}, (), None),
        ({"prompt": "a"}, (5, 6), [5, 6]),
        ({"messages": [{"role": "user", "content": "a"}]}, (5, 6), None),
    ],
    ids=["at first", "a completion", "a conversation"],
)
def test_only_a_completion_goes_on_after_the_tokens_that_have_come(fields, received, resumed):
    body = json.loads(body_of(fields, Call(Means(), 7, received)))
    assert body == fields | {"stream": True, "return_token_ids": True, "seed": 7} | (
        {} if resumed is None else {"resume_token_ids": resumed}
    )


PAGE = b"<html><h1>502 Bad Gateway</h1></html>"


@pytest.mark.parametrize(
    ("status", "again"),
    [
        *((status, False) for status in (400, 401, 404, 413, 501)),
        *((status, True) for status in (408, 429, 500, 502, 503, 504)),
    ],
)
def test_what_a_proxy_says_of_a_server_that_died_is_tried_again(status, again):
    assert refused_call(status, {}, PAGE).again is again


def test_a_bug_of_the_server_and_a_deadline_that_passed_are_not_tried_again():
    for error in (EngineFailed("broken"), DeadlineExceeded("the deadline passed before the first token")):
        answer = error_response(error, "r1")
        assert not refused_call(answer.status_code, answer.headers, answer.body).again


def test_an_answer_that_changed_ends_the_call_by_its_code():
    event = json.dumps(error_body(AnswerChanged("another answer"), "r1")).encode()
    with pytest.raises(TryFailed) as caught:
        list(Events().feed(b"data: " + event + b"\n\n"))
    with pytest.raises(Refused) as refused:
        Call(Means(), 7).pause(caught.value)
    assert refused.value.code == "answer_changed"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Unavailable("the server shut down before the first token"), True),
        (QueueFull("the queue is full"), True),
        (RateLimited("too many", 7, "key_tokens"), True),
        (EngineFailed("broken"), False),
        (DeadlineExceeded("late"), False),
        (InvalidRequest("wrong", "seed"), False),
    ],
)
def test_an_error_in_a_stream_is_tried_again_where_its_status_would_be(error, again):
    """A stream's headers are sent before its first token where that is late."""
    event, answer = json.dumps(error_body(error, "r1")).encode(), error_response(error, "r1")
    with pytest.raises(TryFailed) as caught:
        list(Events().feed(b"data: " + event + b"\n\n"))
    assert caught.value.again is again is refused_call(answer.status_code, answer.headers, answer.body).again


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_a_grpc_stream_that_is_reset_is_tried_again_and_a_bug_of_the_server_is_not(code):
    """The server's own statuses have the call's id beside them."""
    call = Call(Means(Policy()), 7)

    def ended(*beside):
        return failed_try(SimpleNamespace(code=lambda: code, details=lambda: "why", trailing_metadata=lambda: beside), call)

    assert ended().again and not ended(("x-request-id", "r1")).again
