"""Ignored request fields: counted by route, and each name logged once a minute."""

import logging
import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter

from attend.service.contract.routes import ROUTES

log = logging.getLogger("attend.requests")

SECONDS = 60.0
MAX_NAMES = 256
"""Names that are remembered; while there are so many, others are counted and not logged."""


class IgnoredFields:
    """Counts and logs the ignored fields of a replica's calls."""

    def __init__(self, model: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        about = "Requests' fields that were ignored, as the answer's header x-attend-ignored says"
        self._counter = Counter("attend_ignored_fields", about, ["model", "route"], registry=registry)
        self._model = model
        self._clock = clock
        self._told: dict[str, float] = {}
        for route in ROUTES:
            if route.method == "POST":
                self._counter.labels(model, route.path)

    def add(self, route: str, request_id: str, names: Sequence[str]) -> None:
        """Count the ignored fields of a call, and log those that were not logged for a minute."""
        if not names:
            return
        self._counter.labels(self._model, route).inc(len(names))
        now = self._clock()
        if new := [name for name in names if self._is_new(name, now)]:
            log.info("request %s: %s ignored: %s", request_id, "fields" if len(new) > 1 else "field", ", ".join(new))

    def _is_new(self, name: str, now: float) -> bool:
        if now - self._told.get(name, -SECONDS) < SECONDS:
            return False
        if name not in self._told and len(self._told) >= MAX_NAMES:
            self._told = {name: at for name, at in self._told.items() if now - at < SECONDS}
            if len(self._told) >= MAX_NAMES:
                return False
        self._told[name] = now
        return True
