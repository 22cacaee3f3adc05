"""Registers attend.v1.GenerationService with a server. Requests come to the methods as bytes.

The generated registration would read each message on the event loop, before its caller is known, and answer bytes that are no
message with UNKNOWN and the text of a Python exception. In a replica of Ray Serve each call is a stream of messages to the
server, so that its one message is read after its key is judged, in time, and within the bounds of all bodies (`reading.py`);
Serve's own handler then takes it as if the server had read it, and gives the call its place.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from inspect import isasyncgenfunction
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from attend.model.errors import AttendError
from attend.service.grpc_api.limits import most_bytes
from attend.service.grpc_api.reading import one_message_handler, receive_message
from attend.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from attend.service.grpc_api.servicer import GrpcMethods

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
UNREAD = b""
"""What Serve's handler gets of a call whose key is refused: the method refuses it again before it reads."""
_own: "GrpcMethods | None" = None
"""The methods of the replica that this process is; None in Serve's own proxy."""


def behind_serve(methods: "GrpcMethods") -> None:
    """Tell whose keys and bounds hold for the calls of this process. Called before Serve starts the server of a replica."""
    global _own
    _own = methods


def add_generation_service(servicer: Any, server: Any) -> None:
    """What Serve's `grpc_servicer_functions` names; same signature as the generated function."""
    handlers = {}
    serves, own = getattr(server, "service_handler_factory", None), _own
    for method in SERVICE.methods:
        handler, serialize = getattr(servicer, method.name), GetMessageClass(method.output_type).SerializeToString
        if serves is None or own is None:
            make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        else:
            make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
        handlers[method.name] = make(handler, response_serializer=serialize)
    if serves is not None:  # Serve's server, which puts handlers of its own in place of these
        server.service_handler_factory = lambda **kind: _make_handler(serves, own, **kind)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _make_handler(serves: Callable[..., Any], own: "GrpcMethods | None", *, service_method: str, streaming_type: Any) -> Any:
    """The handler of a method of ours, or of another service, for one kind of calls."""
    kinds = type(streaming_type)
    of_one = {kinds.STREAM_UNARY: kinds.UNARY_UNARY, kinds.STREAM_STREAM: kinds.UNARY_STREAM}.get(streaming_type)
    if own is None or of_one is None or service_method.split("/")[1] != SERVICE.full_name:
        return serves(service_method=service_method, streaming_type=streaming_type)
    return _reading(serves(service_method=service_method, streaming_type=of_one), own)


def _reading(answer: Callable[..., Any], own: "GrpcMethods") -> Callable[..., Any]:
    """Serve's handler of one message, for a call whose message is read here."""

    async def begin(messages: AsyncIterator[bytes], context: Any, resources: ExitStack) -> Any:
        try:
            turn = own.turn_of(context)
        except AttendError:
            return answer(UNREAD, context)
        most = most_bytes(own.service.engine.info.max_model_len)
        return answer(await receive_message(messages, own.unread_bodies, turn, most), context)

    return one_message_handler(begin, bytes, streams=isasyncgenfunction(answer))
