"""Admission for several models: authentication and limits before a body is read or a model is loaded."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics

from attend.model.errors import AttendError, ModelNotFound, Overloaded, RateLimited, Unauthenticated, Unavailable
from attend.service.access.caller import Caller, Callers
from attend.service.access.keys import KeyRing
from attend.service.contract.routes import COUNTED
from attend.service.errors import SHUTTING_DOWN, TABLE, ModelUnavailable, wire
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.observe.limited_lines import AuthFailures
from attend.service.records import Arrival

log = logging.getLogger("attend.requests")
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each one, of no use to Prometheus

SERVER = "server"
"""The label `model` of what is of no model, and the label `replica` of what the server itself counts."""


class CallAuthenticator:
    """The keys and the limits of all models together. A key's requests of a minute are counted here, over all models."""

    def __init__(self, keys: KeyRing | None, callers: Callers, is_draining: Callable[[], bool]) -> None:
        self.keys, self.callers, self.is_draining = keys, callers, is_draining
        self.unread_bodies = UnreadBodies()
        self.registry = CollectorRegistry()
        self.failures = AuthFailures(SERVER, self.registry)
        about = "Calls that the server refused, or could not pass to their model, by error code"
        self._refusals = Counter("attend_models_refusals", about, ["transport", "code"], registry=self.registry)
        for transport, error in product(COUNTED, (Unauthenticated, ModelNotFound, ModelUnavailable, Overloaded, RateLimited)):
            self._refusals.labels(transport, TABLE[error].code)

    def enter(
        self, headers: Iterable[tuple[str, str]], peer: str | None, *, answers: int, transport: str
    ) -> tuple[Caller, Arrival]:
        """The caller of a call, charged for it. `answers`: 1 where the call holds a place of its key's.

        Raises Unauthenticated, RateLimited, or Unavailable while the server drains.
        """
        sent = list(headers)
        caller = self.callers.of(sent, peer)
        if self.keys is not None:
            caller = replace(caller, key=self.keys.among(sent, partial(self.failures.add_beside, transport)))
        if self.is_draining():
            raise Unavailable(SHUTTING_DOWN)
        if caller.key is not None:
            caller.key.arrive(answers)
        return caller, Arrival(caller.turn, asyncio.get_running_loop().time())

    def count_refusal(
        self, error: BaseException, transport: str, route: str, request_id: str, peer: str | None, *, was_begun: bool = False
    ) -> None:
        """Count and log a call that no process of a model has seen to its end. `was_begun`: some of its answer was sent."""
        code = wire(error).code
        self._refusals.labels(transport, code).inc()
        if isinstance(error, Unauthenticated) and not self.failures.add(transport):
            return
        if isinstance(error, AttendError):
            how = "broke off" if was_begun else "refused"
            log.info("%s %s %s: %s, error %s, from %s: %s", transport, route, request_id, how, code, peer, error)

    def log_cut(self, transport: str, route: str, request_id: str, model: str) -> None:
        """Log a call that was ended since its caller read too slowly."""
        log.info("%s %s %s: cut, since its caller reads too slowly from the model %s", transport, route, request_id, model)
