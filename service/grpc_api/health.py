"""The standard gRPC health service: SERVING until the server is told to end."""

import asyncio
from collections.abc import AsyncIterator

from grpc import StatusCode
from grpc_health.v1 import health_pb2

from attend.model.params import describe
from attend.service.contract.routes import SERVICE
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.limits import MAX_WATCHES
from attend.service.grpc_api.reading import Context

SERVICES = ("", SERVICE)
"""What a health check may ask for: the server, or its one service by name."""
WATCH_SECONDS = 0.5
"""How often a health watch looks for a change."""


class HealthMethods:
    """The methods of the service of this name. Whoever has them says when it drains."""

    unread_bodies: UnreadBodies
    """The messages that are not read yet."""
    is_leaving = False
    """True once callers should go elsewhere. Their calls are still answered."""
    _num_watches = 0

    def is_draining(self) -> bool:
        """True if new calls are refused."""
        raise NotImplementedError

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Health of the replica that answers; NOT_FOUND for a service that is not here."""
        if request.service not in SERVICES:
            grpc_context.set_code(StatusCode.NOT_FOUND)
            grpc_context.set_details(f"service {describe(request.service)} is not known")
        return health_pb2.HealthCheckResponse(status=self._health())

    async def List(self, request: health_pb2.HealthListRequest) -> health_pb2.HealthListResponse:  # noqa: N802
        """Health of each service of the replica that answers."""
        now = health_pb2.HealthCheckResponse(status=self._health())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(SERVICES, now))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Health at once and at each change; ends when draining has begun. A service that is not here is unknown until then."""
        if self._num_watches >= MAX_WATCHES:
            grpc_context.set_code(StatusCode.RESOURCE_EXHAUSTED)
            grpc_context.set_details(f"{MAX_WATCHES} health watches are open already")
            return
        told, draining = None, False
        self._num_watches += 1
        try:
            while not draining:
                draining = self.is_draining()
                unknown = request.service not in SERVICES
                now = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN if unknown else self._health()
                if now != told:
                    told = now
                    yield health_pb2.HealthCheckResponse(status=now)
                if not draining:
                    await asyncio.sleep(WATCH_SECONDS)
        finally:
            self._num_watches -= 1

    def _health(self) -> int:
        kind = health_pb2.HealthCheckResponse
        return int(kind.NOT_SERVING if self.is_leaving or self.is_draining() else kind.SERVING)
