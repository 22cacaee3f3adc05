"""gRPC reflection of a server without Ray, bounded, since it needs no key."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from attend.service.grpc_api.register import SERVICE

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_STREAMS = 32
"""Reflection streams at a time."""
STREAM_SECONDS = 10.0


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc, name-defined]  # untyped
    """Tells of the services, a few callers at a time, each for so long."""

    def __init__(self) -> None:
        super().__init__((SERVICE.full_name, HEALTH, reflection.SERVICE_NAME))
        self._num_streams = 0

    async def ServerReflectionInfo(self, request_iterator: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer the questions of one stream; RESOURCE_EXHAUSTED where too many are open."""
        if self._num_streams >= MAX_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} reflection streams are open already")
        self._num_streams += 1
        try:
            async with asyncio.timeout(STREAM_SECONDS):
                async for answer in super().ServerReflectionInfo(request_iterator, context):
                    yield answer
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"reflection takes at most {STREAM_SECONDS:g} seconds")
        finally:
            self._num_streams -= 1
