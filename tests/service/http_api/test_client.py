"""What OpenAI's own client makes of the service, over a real HTTP server."""

import socket
import threading
from types import SimpleNamespace

import openai
import pytest
import uvicorn

from attend.model.errors import Overloaded
from tests.fakes import FakeEngine, build_server, says


@pytest.fixture(scope="module")
def client():
    """OpenAI's client against the application behind a real HTTP server on a free loopback port."""
    engine = FakeEngine(says("hello, world"))
    config = uvicorn.Config(build_server(engine).app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
            yield SimpleNamespace(openai=made, engine=engine)
        server.should_exit = True
        thread.join()


def test_openais_client_reads_a_whole_answer(client):
    answer = client.openai.completions.create(model="fake", prompt="a", max_tokens=50, stop=["wor"], seed=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello, ", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 10)
    assert answer._request_id in answer.id


def test_openais_client_reads_a_stream(client):
    options = {"include_usage": True}
    stream = client.openai.completions.create(model="fake", prompt="a", max_tokens=50, stream=True, stream_options=options)
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello, world"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert (last.choices, last.usage.total_tokens) == ([], 14)


def test_openais_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="n must be") as caught:
        client.openai.completions.create(model="fake", prompt="a", n=9)
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.openai.completions.create(model="gpt-4", prompt="a")
    client.engine.refusal = Overloaded("the queue is full")
    with pytest.raises(openai.RateLimitError, match="full"):
        client.openai.completions.create(model="fake", prompt="a")
    client.engine.refusal, client.engine.broken_after = None, 3
    with pytest.raises(openai.APIError, match="internal error; request id"):
        list(client.openai.completions.create(model="fake", prompt="a", stream=True))
    client.engine.broken_after = None


def test_openais_client_lists_the_model(client):
    assert [model.id for model in client.openai.models.list()] == ["fake"]
    assert client.openai.models.retrieve("fake").id == "fake"
