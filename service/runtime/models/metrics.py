"""Metrics of a server of several models: its own, and those of the loaded models."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from attend.service.observe.exposition import merge, replica_counts
from attend.service.runtime.models.pool import Pool, Process, State

SERVER = "server"
"""The label `model` of what is of no model, and the label `replica` of what the server itself counts."""
SECONDS = 2.0
"""How long a page waits for the processes of the models."""


class PoolCollector(Collector):
    """What the pool knows of its models, read at each scrape."""

    def __init__(self, pool: "Pool[Any]") -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """The metrics of all models at this moment."""
        gauge, counter, slots = GaugeMetricFamily, CounterMetricFamily, list(self._pool.slots.values())
        states = gauge("attend_model_state", "1 for the state that a model is in", labels=["model", "state"])
        about = "Models that were unloaded, by reason: nobody called them (idle), or another needed their memory (memory)"
        unloads = counter("attend_model_unloads", about, labels=["model", "reason"])
        loads = SummaryMetricFamily("attend_model_load_seconds", "Time to load a model, once there is room", labels=["model"])
        for slot in slots:
            for state in State:
                states.add_metric([slot.name, state.value], float(slot.state is state))
            for reason in ("idle", "memory"):
                unloads.add_metric([slot.name, reason], slot.counts[reason])
            loads.add_metric([slot.name], slot.counts["loads"], slot.load_seconds)
        yield from (states, unloads, loads)
        for kind, name, text, values in (
            (gauge, "memory_bytes", "Memory that a model counts for while it is loading or loaded", [s.memory for s in slots]),
            (gauge, "calls", "Calls that the process of a model has now", [s.calls for s in slots]),
            (gauge, "calls_waiting", "Calls that wait for a model to load", [s.waiting for s in slots]),
            (counter, "load_failures", "Loads of a model that failed", [s.counts["load_failures"] for s in slots]),
            (counter, "deaths", "Processes of a model that ended without being told to", [s.counts["deaths"] for s in slots]),
        ):
            found = kind(f"attend_model_{name}", text, labels=["model"])
            for slot, value in zip(slots, values, strict=True):
                found.add_metric([slot.name], value)
            yield found
        budget = "Memory that all loaded models together may take"
        yield gauge("attend_models_memory_budget_bytes", budget, self._pool.plan.budget)
        yield gauge("attend_models_memory_taken_bytes", "Memory that they count for now", self._pool.memory_held())


async def models_page(registry: CollectorRegistry, pool: "Pool[Any]") -> str:
    """The page over all models that are loaded. The label `replica` is the model's name, or `server`."""
    loaded = {slot.name: slot.process for slot in pool.slots.values() if slot.state is State.LOADED}
    found = await asyncio.gather(*(fetch_from_model(process, "/metrics") for process in loaded.values()))
    pages = [(name, text.decode()) for name, text in zip(loaded, found, strict=True) if text is not None]
    merged = await asyncio.to_thread(merge, [*pages, (SERVER, generate_latest(registry).decode())])
    return merged + replica_counts(len(loaded), len(pages))


async def fetch_from_model(process: Process | None, path: str, headers: dict[str, str] | None = None) -> bytes | None:
    """What the process of a model answers to a GET; None where it does not, or not in time."""
    session: aiohttp.ClientSession = getattr(process, "http")  # noqa: B009
    try:
        async with asyncio.timeout(SECONDS), session.get(path, headers=headers) as answer:
            return await answer.read() if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, RuntimeError, TimeoutError):  # RuntimeError: the session was closed meanwhile
        return None
