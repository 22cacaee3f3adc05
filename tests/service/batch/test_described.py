"""Answers and failures of files and batches are as /openapi.json has them."""

import asyncio

from attend.service.access.quota import Limits as KeyLimits
from attend.service.batch import upload
from attend.service.http_api.openapi import OPERATIONS
from tests.service.batch.test_crashes import full
from tests.service.batch.world import COMPLETIONS, keys_of, line, serving
from tests.service.http_api.described import assert_described, document

BATCH_OPERATIONS = {row: each for row, each in OPERATIONS.items() if row[1].startswith(("/v1/files", "/v1/batches"))}
GONE = {"file_id": f"file-{'0' * 32}", "batch_id": f"batch_{'0' * 32}"}


def test_what_is_described_is_what_comes(tmp_path, monkeypatch):
    seen = set()

    async def law():
        async with serving(tmp_path, starts=False, limits={"file_bytes": 1000, "key_files": 2}) as world:

            async def check(method, path, ids=GONE, status=200, **more):
                answer = await world.call(method.upper(), path.format(**ids), **more)
                assert answer.status_code == status, (method, path, answer.text)
                assert_described(answer, document()["paths"][path][method])
                seen.add((method, path, status))
                return answer

            async def send(status, content=b"x", purpose="batch"):
                return await check("post", "/v1/files", status=status, files={"file": content}, data={"purpose": purpose})

            for method, path in BATCH_OPERATIONS:
                if "{" in path:
                    await check(method, path, status=404)
            monkeypatch.setattr(upload.os, "write", full)
            await send(507)
            monkeypatch.undo()
            await send(400, purpose="other")
            await send(413, content=b"x" * 2000)
            await check("post", "/v1/files", status=415, json={})
            ids = {"file_id": (await send(200)).json()["id"]}
            body = {"input_file_id": ids["file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
            ids["batch_id"] = (await check("post", "/v1/batches", json=body)).json()["id"]
            await check("delete", "/v1/files/{file_id}", ids, 400)
            for path in (
                "/v1/files",
                "/v1/files/{file_id}",
                "/v1/files/{file_id}/content",
                "/v1/batches",
                "/v1/batches/{batch_id}",
            ):
                await check("get", path, ids)
            await check("get", "/v1/files", status=400, params={"limit": "0"})
            await check("get", "/v1/batches", status=400, params={"limit": "0"})
            await check("get", "/v1/batches", status=404, params={"after": "x"})
            await check("get", "/v1/files", status=404, params={"after": "x"})
            await check("post", "/v1/batches/{batch_id}/cancel", ids)
            await check("post", "/v1/batches", json=body | {"completion_window": "1h"}, status=400)
            await check("post", "/v1/batches", json=body | {"input_file_id": "x"}, status=404)
            await check("post", "/v1/batches", content=b"{}", headers={"content-type": "text/plain"}, status=415)
            await check("post", "/v1/batches", json={"endpoint": "x" * (1 << 20)}, status=413)
            await check("post", "/v1/batches", json=body)
            await check("post", "/v1/batches", json=body, status=403)
            other = (await send(200)).json()["id"]
            await send(403)
            await check("delete", "/v1/files/{file_id}", {"file_id": other})

    asyncio.run(law())
    described = {(*row, status) for row, each in BATCH_OPERATIONS.items() for status in each.failures}
    left = {one for one in described - seen if one[2] not in (401, 429, 500)}
    assert left <= {("get", "/v1/files/{file_id}/content", 507), ("post", "/v1/batches", 507), ("post", "/v1/files", 404)}


async def test_a_key_without_requests_left_is_told_as_described(tmp_path):
    keys = keys_of(tmp_path, ann=KeyLimits(requests_per_minute=1))
    async with serving(tmp_path, keys=keys, starts=False) as world:
        await world.upload([line(1)], "ann")
        for method, path in BATCH_OPERATIONS:
            answer = await world.call(method.upper(), path.format(**GONE), "ann")
            assert answer.status_code == 429
            assert_described(answer, document()["paths"][path][method])
