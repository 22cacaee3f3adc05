"""A server with files and batches around an engine that counts, and what a caller does with it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Limits as KeyLimits
from attend.service.batch.rows import OPEN
from attend.service.batch.service import BatchService
from attend.service.batch_settings import BatchSettings
from tests.fakes import FakeEngine, Server, build_server

COMPLETIONS = "/v1/completions"


class Clock:
    """The time of day, which a test moves on."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"prompt": "a", "max_tokens": 3, "seed": number}
    return {"custom_id": f"r{number}", "method": "POST", "url": COMPLETIONS, "body": body} | changes


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def keys_of(folder: Path, **limits: KeyLimits) -> KeyRing:
    """A ring of keys, each of which is its name."""
    write_keys(folder / "keys", {name: Entry(digest_of(name.encode()), each) for name, each in limits.items()})
    return KeyRing(folder / "keys")


class World:
    """One server, and one caller after another."""

    def __init__(self, server: Server, batch_service: BatchService, client: httpx.AsyncClient, clock: Clock) -> None:
        self.server, self.batch_service, self.client, self.clock = server, batch_service, client, clock

    async def call(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {}) | ({"authorization": f"Bearer {key}"} if key else {})
        return await self.client.request(method, path, headers=headers, **more)

    async def upload(self, lines: Iterable[Any], key: str | None = None, name: str = "l.jsonl") -> str:
        files = {"file": (name, jsonl(lines))}
        answer = await self.call("POST", "/v1/files", key, files=files, data={"purpose": "batch"})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def create(self, lines: Iterable[Any], key: str | None = None, endpoint: str = COMPLETIONS) -> str:
        body = {"input_file_id": await self.upload(lines, key), "endpoint": endpoint, "completion_window": "24h"}
        answer = await self.call("POST", "/v1/batches", key, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def batch(self, batch_id: str, key: str | None = None) -> dict[str, Any]:
        answer = await self.call("GET", f"/v1/batches/{batch_id}", key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ended(self, batch_id: str, key: str | None = None, seconds: float = 20) -> dict[str, Any]:
        """The batch, once it has ended."""
        deadline = time.monotonic() + seconds
        while (batch := await self.batch(batch_id, key))["status"] in OPEN:
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.02)
        return batch

    async def until(self, condition: Callable[[dict[str, Any]], bool], batch_id: str, key: str | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while not condition(batch := await self.batch(batch_id, key)):
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.02)
        return batch

    async def rows(self, file_id: str | None, key: str | None = None) -> list[dict[str, Any]]:
        """The lines of a file; none where there is no file."""
        if file_id is None:
            return []
        answer = await self.call("GET", f"/v1/files/{file_id}/content", key)
        assert answer.status_code == 200, answer.text
        return [json.loads(row) for row in answer.content.splitlines()]

    async def run(self, lines: Sequence[Any], key: str | None = None, endpoint: str = COMPLETIONS) -> tuple[Any, Any, Any]:
        """(batch, rows of its output, rows of its errors)."""
        batch = await self.ended(await self.create(lines, key, endpoint), key)
        return batch, await self.rows(batch["output_file_id"], key), await self.rows(batch["error_file_id"], key)


def usage_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The `usage` of a batch with these rows in its output."""
    found = [row["response"]["body"]["usage"] for row in rows]

    def total(*names: str, inner: str | None = None) -> int:
        held = [next((each[name] for name in names if name in each), {} if inner else 0) for each in found]
        return sum(each.get(inner, 0) if inner else each for each in held)

    read, written = total("input_tokens", "prompt_tokens"), total("output_tokens", "completion_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": total("input_tokens_details", "prompt_tokens_details", inner="cached_tokens")
        },
        "output_tokens": written,
        "output_tokens_details": {
            "reasoning_tokens": total("output_tokens_details", "completion_tokens_details", inner="reasoning_tokens")
        },
        "total_tokens": read + written,
    }


@asynccontextmanager
async def serving(
    folder: Path,
    engine: FakeEngine | None = None,
    *,
    keys: KeyRing | None = None,
    starts: bool = True,
    clock: Clock | None = None,
    limits: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[World]:
    """A server over a folder, which another may have used before, or uses too."""
    clock = clock or Clock()
    settings = BatchSettings(
        batch_folder=str(folder / "batches"), **{f"batch_{name}": value for name, value in (limits or {}).items()}
    )
    batch_service = BatchService(settings, 16, clock)
    server = build_server(engine, keys=keys, batch_service=batch_service, **more)
    assert server.runner is not None
    if starts:
        server.runner.start()
    try:
        async with server.http() as client:
            yield World(server, batch_service, client, clock)
    finally:
        await server.runner.close()
        batch_service.close()
