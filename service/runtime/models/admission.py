"""Admission for several models: authentication and limits before a body is read or a model is loaded."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attend.model.errors import AttendError, DeadlineExceeded, ModelNotFound, Unauthenticated, Unavailable
from attend.model.params import describe
from attend.service.access.caller import Callers
from attend.service.access.keys import KeyRing
from attend.service.errors import SHUTTING_DOWN, ModelUnavailable, wire
from attend.service.generation.slow_reader import SlowReaderGuard
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.health import HealthMethods
from attend.service.observe.collectors import AuthFailures
from attend.service.records import Arrival
from attend.service.runtime.models.pool import Pool, Slot, State
from attend.service.runtime.models.process import ModelProcess

SERVER = "server"
"""The label `model` of what is of no model, and the label `replica` of what the server itself counts."""
log = logging.getLogger("attend.requests")
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each one, of no use to Prometheus


class PoolCollector(Collector):
    """What the pool knows of its models, read at each scrape."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """The metrics of all models at this moment."""
        slots = self._pool.slots
        states = GaugeMetricFamily("attend_model_state", "1 for the state that a model is in", labels=["model", "state"])
        calls = GaugeMetricFamily("attend_model_calls", "Calls that the process of a model has now", labels=["model"])
        failures = CounterMetricFamily("attend_model_load_failures", "Loads of a model that failed", labels=["model"])
        about = "Processes of a model that ended without being told to"
        deaths = CounterMetricFamily("attend_model_deaths", about, labels=["model"])
        for name, slot in slots.items():
            for state in State:
                states.add_metric([name, state.value], float(slot.state is state))
            calls.add_metric([name], slot.calls)
            failures.add_metric([name], slot.counts["load_failures"])
            deaths.add_metric([name], slot.counts["deaths"])
        budget = "Memory that all loaded models together may take"
        yield from (states, calls, failures, deaths)
        yield GaugeMetricFamily("attend_models_memory_budget_bytes", budget, self._pool.plan.budget)


class Admission(HealthMethods):
    """The keys and the limits of all models together, and the server's health, in which a model that is not loaded is no fault.

    A key's requests of a minute are counted here, over all models.
    """

    def __init__(self, keys: KeyRing | None, callers: Callers, pool: Pool, seconds: float) -> None:
        """`seconds`: how long a call may wait for its model."""
        self.keys, self.pool = keys, pool
        self.unread_bodies = UnreadBodies()
        self.registry = CollectorRegistry()
        self.registry.register(PoolCollector(pool))
        self.failures = AuthFailures(SERVER, self.registry)
        self._callers, self._seconds = callers, seconds

    def is_draining(self) -> bool:
        """True if new calls are refused."""
        return self.pool.is_closing

    def enter(self, headers: Iterable[tuple[str, str]], peer: str | None, *, answers: int, transport: str) -> Arrival:
        """The arrival of a call, whose caller is charged for it. `answers`: 1 where the call holds a place of its key's.

        Raises Unauthenticated, RateLimited, or Unavailable while the server drains.
        """
        sent = list(headers)
        caller = self._callers.of(sent, peer)
        if self.keys is not None:
            caller = replace(caller, key=self.keys.among(sent, partial(self.failures.add_beside, transport)))
        if self.is_draining():
            raise Unavailable(SHUTTING_DOWN)
        if caller.key is not None:
            caller.key.arrive(answers)
        return Arrival(caller.turn, asyncio.get_running_loop().time())

    def find_model(self, name: str) -> Slot:
        """The model of this name. Raises ModelNotFound."""
        if (slot := self.pool.find(name)) is None:
            known = ", ".join(map(repr, list(self.pool.slots)[:16]))
            raise ModelNotFound(f"the model {describe(name)} does not exist; this server has {known}")
        return slot

    @asynccontextmanager
    async def use(
        self,
        slot: Slot,
        turn: str | None,
        size: int,
        deadline_ms: int | None,
        guard: SlowReaderGuard,
        about: str,
        seconds: float | None = None,
    ) -> AsyncIterator[tuple[ModelProcess, int | None]]:
        """The process of a call's model, and the milliseconds that are left of its deadline where it has waited for it.

        The `size` bytes of its body count as unread meanwhile. `guard` ends a call that holds up another model, and the log has
        what it is `about` then. Raises DeadlineExceeded, and what `Pool.use` raises.
        """
        guard.end_where(lambda: slot.yields)
        limits = [self._seconds, seconds, deadline_ms and deadline_ms / 1000]
        now = asyncio.get_running_loop().time
        began = now()
        async with AsyncExitStack() as held:
            with self.unread_bodies.call(turn) as waits:
                waits.came(size)
                try:
                    async with waits.waiting(), asyncio.timeout(min(limit for limit in limits if limit is not None)):
                        process = await held.enter_async_context(self.pool.use(slot, turn))
                except TimeoutError as error:
                    if deadline_ms:
                        raise DeadlineExceeded("the deadline passed before the model was loaded") from error
                    raise ModelUnavailable(f"the model {slot.name!r} is still loading") from error
            process.check()
            waited = round(1000 * (now() - began))
            try:
                yield process, max(1, deadline_ms - waited) if deadline_ms and waited else None
            finally:
                if guard.over:
                    log.info("%s: cut, since its caller reads too slowly from the model %s", about, slot.name)

    def log_refusal(self, error: BaseException, transport: str, route: str, request_id: str, peer: str | None) -> None:
        """Log, and count where its key is unknown, a call that no process of a model has seen to its end."""
        if isinstance(error, Unauthenticated) and not self.failures.add(transport):
            return
        if isinstance(error, AttendError):
            code = wire(error).code
            log.info("%s %s %s: refused, error %s, from %s: %s", transport, route, request_id, code, peer, error)
