"""Registers attend.v1.GenerationService with a server, so that bytes that are no message reach our own code.

The generated registration would have grpc answer UNKNOWN with the text of a Python exception.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from protos.attend.v1 import generation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands in for a request whose bytes could not be decoded."""

    message_type: str


def add_generation_service(servicer: Any, server: Any) -> None:
    """What Serve's `grpc_servicer_functions` names; same signature as the generated function."""
    handlers = {}
    for method in SERVICE.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=decoder(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def decoder(message_class: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """Bytes to a message, or to what says that they are none."""

    def decode(data: bytes) -> Message | Malformed:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return Malformed(message_class.DESCRIPTOR.name)

    return decode
