"""Metrics of a server of several models: its own, and those of the loaded models."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from attend.service.observe.exposition import merge, replica_counts
from attend.service.runtime.models.authentication import SERVER, CallAuthenticator
from attend.service.runtime.models.pool import Pool, Process, State

SECONDS = 2.0
"""How long a page waits for the processes of the models."""


class PoolCollector(Collector):
    """What the pool knows of its models, read at each scrape."""

    def __init__(self, pool: "Pool[Any]") -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """The metrics of all models at this moment."""
        slots = list(self._pool.slots.values())
        states = GaugeMetricFamily("attend_model_state", "1 for the state that a model is in", labels=["model", "state"])
        for slot in slots:
            for state in State:
                states.add_metric([slot.name, state.value], float(slot.state is state))
        yield states
        gauges = {
            "memory_bytes": ("Memory that a model counts for while it is loading or loaded", [s.memory for s in slots]),
            "calls": ("Calls that the process of a model has now", [s.calls for s in slots]),
            "calls_waiting": ("Calls that wait for a model to load", [s.waiting for s in slots]),
        }
        for name, (text, values) in gauges.items():
            gauge = GaugeMetricFamily(f"attend_model_{name}", text, labels=["model"])
            for slot, value in zip(slots, values, strict=True):
                gauge.add_metric([slot.name], value)
            yield gauge
        counters = {
            "load_failures": ("Loads of a model that failed", [s.load_failures for s in slots]),
            "deaths": ("Processes of a model that ended without being told to", [s.deaths for s in slots]),
        }
        for name, (text, values) in counters.items():
            counter = CounterMetricFamily(f"attend_model_{name}", text, labels=["model"])
            for slot, value in zip(slots, values, strict=True):
                counter.add_metric([slot.name], value)
            yield counter
        yield from self._lives()

    def _lives(self) -> Iterator[Metric]:
        about = "Models that were unloaded, by reason: nobody called them (idle), or another needed their memory (memory)"
        unloads = CounterMetricFamily("attend_model_unloads", about, labels=["model", "reason"])
        loads = SummaryMetricFamily("attend_model_load_seconds", "Time to load a model, once there is room", labels=["model"])
        for slot in self._pool.slots.values():
            for reason, count in slot.unloads.items():
                unloads.add_metric([slot.name, reason], count)
            loads.add_metric([slot.name], slot.loads, slot.load_seconds)
        yield unloads
        yield loads
        yield GaugeMetricFamily(
            "attend_models_memory_budget_bytes", "Memory that all loaded models together may take", self._pool.plan.budget
        )
        yield GaugeMetricFamily("attend_models_memory_taken_bytes", "Memory that they count for now", self._pool.memory_held())


def own_page(authenticator: CallAuthenticator) -> str:
    """What the server counts itself."""
    return generate_latest(authenticator.registry).decode()


async def models_page(authenticator: CallAuthenticator, pool: "Pool[Any]") -> str:
    """The page over all models that are loaded. The label `replica` is the model's name, or `server`."""
    loaded = {slot.name: slot.process for slot in pool.slots.values() if slot.state is State.LOADED}
    found = await asyncio.gather(*(fetch_from_model(process, "/metrics") for process in loaded.values()))
    pages = [(name, text.decode()) for name, text in zip(loaded, found, strict=True) if text is not None]
    merged = await asyncio.to_thread(merge, [*pages, (SERVER, own_page(authenticator))])
    return merged + replica_counts(len(loaded), len(pages))


async def fetch_from_model(process: Process | None, path: str, headers: dict[str, str] | None = None) -> bytes | None:
    """What the process of a model answers to a GET; None where it does not, or not in time."""
    session: aiohttp.ClientSession = getattr(process, "http")  # noqa: B009
    try:
        async with asyncio.timeout(SECONDS), session.get(path, headers=headers) as answer:
            return await answer.read() if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, RuntimeError, TimeoutError):  # RuntimeError: the session was closed meanwhile
        return None
