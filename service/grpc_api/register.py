"""Registers attend.v1.GenerationService with a server. Requests come to the methods as bytes.

The generated registration would read each message on the event loop, before its caller is known, and answer bytes that are no
message with UNKNOWN and the text of a Python exception.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from attend.service.errors import FULL
from attend.v1 import generation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


def add_generation_service(servicer: Any, server: Any) -> None:
    """What Serve's `grpc_servicer_functions` names; same signature as the generated function."""
    handlers = {}
    for method in SERVICE.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        serialize = GetMessageClass(method.output_type).SerializeToString
        handlers[method.name] = make(getattr(servicer, method.name), response_serializer=serialize)
    serves = getattr(server, "service_handler_factory", None)
    if serves is not None:  # Serve's server, which puts handlers of its own in place of these
        server.service_handler_factory = lambda **kind: _telling(serves(**kind))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _telling(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Serve's handler of a method, which tells the edge where the replica is full."""

    async def whole(request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        response: bytes = await answer(request, context)
        await _tell_edge(context)
        return response

    async def stream(request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[bytes]:
        async with aclosing(answer(request, context)) as responses:
            async for response in responses:
                yield response
        await _tell_edge(context)

    return stream if isasyncgenfunction(answer) else whole


async def _tell_edge(context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    """Serve puts all metadata into the trailers, and HAProxy reads what comes before them: FULL moves there."""
    metadata = dict(context.trailing_metadata())
    if metadata.pop(FULL, None) is not None:
        context.set_trailing_metadata(tuple(metadata.items()))
        await context.send_initial_metadata(((FULL, "1"), ("retry-after", metadata["retry-after"])))
