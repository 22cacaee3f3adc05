"""Failed authentications: counted at each call, and logged at a limited rate."""

import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from attend.service.contract.routes import COUNTED

log = logging.getLogger("attend.requests")

SECONDS = 60.0
MAX_LINES = 60
"""Failed authentications that are logged in a minute."""


class AuthFailures:
    """Counts and logs a replica's calls with keys that are not known, or with none."""

    def __init__(self, model: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        about = "Requests without an API key that is known, or with another one that is not, by transport"
        self._counter = Counter("attend_auth_failures", about, ["model", "transport"], registry=registry)
        self._model, self._clock = model, clock
        self._began, self._lines = -SECONDS, 0
        for transport in COUNTED:
            self._counter.labels(model, transport)

    def add(self, transport: str) -> bool:
        """Count a call. Returns whether it may be logged."""
        self._counter.labels(self._model, transport).inc()
        now = self._clock()
        if now - self._began >= SECONDS:
            self._began, self._lines = now, 0
        self._lines += 1
        if self._lines == MAX_LINES + 1:
            log.warning("calls without a known API key are not logged for the rest of this minute, and counted as before")
        return self._lines <= MAX_LINES

    def add_beside(self, transport: str, key: str, header: str) -> None:
        """Count and log a key that is not known, which came in `header` beside the known one named `key`, and is ignored."""
        if self.add(transport):
            log.info(
                "%s: a call of the key %s has another key in %s, which is not known and is ignored", transport, key, header
            )
