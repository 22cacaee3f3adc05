"""What OpenAI's own client tries again, how long it waits before, and what it leaves alone."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.narrow import MODEL, Narrow
from tests.service.server import running, wait_for

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

TEXT = {"model": MODEL, "prompt": "def f(", "max_tokens": 2}
Seen = list[tuple[int, float]]


@contextlib.contextmanager
def connected(narrow: Narrow, on_answer: Callable[[], object] = lambda: None, **options: Any) -> Iterator[tuple[Any, Seen]]:
    """A client, and the (status, time) of every answer that it got, in order."""
    seen: Seen = []

    def note(answer: Any) -> None:
        seen.append((answer.status_code, time.monotonic()))
        on_answer()

    connection = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    options = {"base_url": f"{narrow.server.url}/v1", "api_key": narrow.key, "max_retries": 3} | options
    with openai.OpenAI(**options, http_client=connection) as client:
        yield client, seen


def test_a_full_server_is_asked_again_after_the_time_it_names(narrow):
    with narrow.full() as answer, connected(narrow, on_answer=answer.close) as (client, seen):
        raw = client.completions.with_raw_response.create(**TEXT)
    assert [status for status, _ in seen] == [429, 200]
    assert raw.retries_taken == 1
    assert raw.parse().choices[0].finish_reason == "length"
    assert seen[1][1] - seen[0][1] >= 1


def test_a_server_that_stays_full_is_a_rate_limit_error(narrow):
    with narrow.full(), connected(narrow, max_retries=0) as (client, seen), pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**TEXT)
    assert caught.value.code == "queue_full"
    assert float(caught.value.response.headers["retry-after"]) >= 1
    assert [status for status, _ in seen] == [429]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_passed_is_not_tried_again(narrow, stream):
    with narrow.busy(), connected(narrow) as (client, seen), pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**TEXT, stream=stream, extra_body={"deadline_ms": 100})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert [status for status, _ in seen] == [504]


def test_a_wrong_key_is_an_authentication_error_that_is_not_tried_again(narrow):
    with connected(narrow, api_key="sk-wrong") as (client, seen), pytest.raises(openai.AuthenticationError) as caught:
        client.completions.create(**TEXT)
    assert caught.value.code == "invalid_api_key"
    assert "sk-wrong" not in str(caught.value)
    assert [status for status, _ in seen] == [401]


@pytest.mark.long
def test_a_server_that_drains_is_asked_again_after_the_time_it_names(tmp_path: Path):
    with running(tmp_path / "log", *Narrow.FLAGS) as server:
        narrow = Narrow(server, "none")
        with narrow.post(prompt="def f(", max_tokens=900, ignore_eos=True, stream=True):
            server.process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: server.get("/readyz")[0] == 503)
            with connected(narrow, max_retries=1) as (client, seen), pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(**TEXT)
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    assert [status for status, _ in seen] == [503, 503]
    assert seen[1][1] - seen[0][1] >= 1
