"""OpenAI's own client: files and batches, as its documentation writes them."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.server import Server, running

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MODEL = "attend-default"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: others keep no files."""
    folder = tmp_path_factory.mktemp("batches")
    with running(folder / "log", "--single", "--dtype", "float32", "--batch-folder", str(folder / "kept")) as server:
        yield server


@pytest.fixture
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def lines(number: int, **body) -> bytes:
    asked = [{"model": MODEL, "prompt": f"def f{at}(", "max_tokens": 8, "temperature": 0} | body for at in range(number)]
    rows = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": each} for at, each in enumerate(asked)]
    return "\n".join(map(json.dumps, rows)).encode()


def ended(client, batch):
    deadline = time.monotonic() + 60
    while batch.status in OPEN:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_a_batch_from_its_file_to_its_answers(client, tmp_path: Path):
    (tmp_path / "lines.jsonl").write_bytes(lines(6))
    with (tmp_path / "lines.jsonl").open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    assert (uploaded.bytes, uploaded.filename, uploaded.purpose) == (len(lines(6)), "lines.jsonl", "batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h", metadata={"run": "7"}
    )
    assert batch.id in [each.id for each in client.batches.list()]
    batch = ended(client, batch)
    assert (batch.status, batch.model, batch.metadata, batch.error_file_id) == ("completed", MODEL, {"run": "7"}, None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 6, 0)
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"r{at}" for at in range(6)]
    tokens = [row["response"]["body"]["usage"] for row in rows]
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in tokens) > 0
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in tokens) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert batch.usage.input_tokens_details.cached_tokens == sum(
        each["prompt_tokens_details"]["cached_tokens"] for each in tokens
    )
    assert batch.usage.output_tokens_details.reasoning_tokens == 0
    for at, row in enumerate(rows):
        direct = client.completions.create(model=MODEL, prompt=f"def f{at}(", max_tokens=8, temperature=0)
        assert row["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert {each.id for each in client.files.list()} >= {uploaded.id, batch.output_file_id}
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(batch.output_file_id)


def test_a_batch_is_cancelled_and_keeps_what_it_has(client):
    uploaded = client.files.create(file=("l.jsonl", io.BytesIO(lines(400, max_tokens=200, ignore_eos=True))), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    while batch.request_counts.completed < 1:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    rest = [json.loads(row) for row in client.files.content(batch.error_file_id).text.splitlines()]
    done = client.files.content(batch.output_file_id).text.splitlines()
    assert (batch.status, len(rest) + len(done)) == ("cancelled", 400)
    assert rest[0]["error"]["code"] == "batch_cancelled"


def test_a_file_that_is_no_batch_fails_with_its_lines(client):
    uploaded = client.files.create(file=("l.jsonl", lines(1) + b"\n{oops"), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h"))
    assert (batch.status, batch.errors.data[0].line, batch.errors.data[0].code) == ("failed", 2, "invalid_json_line")
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
