"""Registers attend.v1.GenerationService with a server. Requests come to the methods as bytes.

The generated registration would read each message on the event loop, before its caller is known, and answer bytes that are no
message with UNKNOWN and the text of a Python exception.
"""

from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from protos.attend.v1 import generation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


def add_generation_service(servicer: Any, server: Any) -> None:
    """What Serve's `grpc_servicer_functions` names; same signature as the generated function."""
    handlers = {}
    for method in SERVICE.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        serialize = GetMessageClass(method.output_type).SerializeToString
        handlers[method.name] = make(getattr(servicer, method.name), response_serializer=serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
