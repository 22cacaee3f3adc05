"""The gRPC methods, to be mixed into the deployment: Serve calls them by name, and knows no interceptors."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2

from model.errors import InvalidRequest
from protos.attend.v1 import generation_pb2 as pb
from service.errors import INTERNAL, sentence, wire
from service.generation import GenerationService
from service.grpc_api.convert import to_command, to_response
from service.grpc_api.register import Malformed
from service.metrics import Metrics
from service.records import REQUEST_ID, whole

log = logging.getLogger("attend.grpc")

WATCH_SECONDS = 0.5
"""How often a health watch looks for a change."""


class Context(Protocol):
    """The part of Serve's gRPC context that is used."""

    def set_code(self, code: Any) -> None:
        """The status of the call."""
        ...

    def set_details(self, details: str) -> None:
        """The sentence beside it."""
        ...


class GrpcMethods:
    """attend.v1.GenerationService and grpc.health.v1.Health. The deployment sets the two attributes."""

    service: GenerationService
    metrics: Metrics

    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        raise NotImplementedError

    async def Generate(self, request: pb.GenerateRequest | Malformed, grpc_context: Context) -> pb.GenerateResponse:  # noqa: N802 - the proto's name
        """The whole answer at once."""
        request_id = id_of(request)
        record = self.metrics.open("grpc", "Generate", request_id)
        record.at_once = True
        try:
            with record.errors():
                batches = self.service.generate(to_command(decoded(request), request_id), record)
                chunks = [chunk async for batch in batches for chunk in batch]
                return to_response(whole(chunks), decoded(request), self.service.engine.info.fingerprint, first=True)
        except Exception as error:
            _refuse(error, request_id, grpc_context)
            return pb.GenerateResponse()

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest | Malformed, grpc_context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer as it is made; each message holds what came together."""
        request_id = id_of(request)
        record = self.metrics.open("grpc", "GenerateStream", request_id)
        first = True
        try:
            with record.errors():
                async with aclosing(self.service.generate(to_command(decoded(request), request_id), record)) as batches:
                    async for chunks in batches:
                        yield to_response(chunks, decoded(request), self.service.engine.info.fingerprint, first=first)
                        first = False
        except Exception as error:
            _refuse(error, request_id, grpc_context)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Not carried out yet."""
        _unimplemented("Tokenize", grpc_context)
        return pb.TokenizeResponse()

    async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Not carried out yet."""
        _unimplemented("Detokenize", grpc_context)
        return pb.DetokenizeResponse()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, grpc_context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """Not carried out yet."""
        _unimplemented("GetServerInfo", grpc_context)
        return pb.GetServerInfoResponse()

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """Health of the replica that answers."""
        return health_pb2.HealthCheckResponse(status=self._health())

    async def Watch(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[health_pb2.HealthCheckResponse]:  # noqa: N802
        """Health at once and at each change; ends when draining has begun."""
        told = None
        while told != health_pb2.HealthCheckResponse.NOT_SERVING:
            if self._health() != told:
                told = self._health()
                yield health_pb2.HealthCheckResponse(status=told)
            await asyncio.sleep(WATCH_SECONDS)

    def _health(self) -> int:
        kind = health_pb2.HealthCheckResponse
        return int(kind.NOT_SERVING if self.is_draining() else kind.SERVING)


def id_of(request: pb.GenerateRequest | Malformed) -> str:
    """The caller's id for the request where it is plain, or a new one."""
    given = "" if isinstance(request, Malformed) else request.request_id
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def decoded(request: pb.GenerateRequest | Malformed) -> pb.GenerateRequest:
    """`request`, unless its bytes were no message."""
    if isinstance(request, Malformed):
        raise InvalidRequest(f"the bytes sent are not a valid {request.message_type}")
    return request


def _unimplemented(method: str, context: Context) -> None:
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    context.set_details(f"{method} is not supported yet")


def _refuse(error: Exception, request_id: str, context: Context) -> None:
    """Set the status. Raising instead would lose the code in a stream, and tell the caller of our insides."""
    row = wire(error)
    if row is INTERNAL:
        log.error("request %s failed", request_id, exc_info=error)
    context.set_code(row.grpc)
    context.set_details(sentence(error, request_id))
