"""Times the phases of building an engine, for one line of the log."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger("attend.engine")


class StartupTimes:
    """Takes times one after the other, and counts what `report` of `checkpoint.load_decoder` is told."""

    def __init__(self, report: Callable[[int, int], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._report, self._clock, self._last = report, clock, clock()
        self._size = 0
        self.seconds: dict[str, float] = {}

    def report(self, num_bytes: int, total: int) -> None:
        """Pass on how many bytes are read, of how many."""
        self._size = total
        self._report(num_bytes, total)

    def end(self, name: str) -> None:
        """What was done since the last lap has this name."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def log(self, reading: float, cache_bytes: int) -> None:
        """Log it. `reading`: the seconds of `weights` in which nothing but files was read."""
        weights = self.seconds["weights"]
        log.info(
            "Loaded %.2f GB in %.1f s (%.0f MB/s): %.1f s to read files, %.1f s to unpack weights; "
            "%.1f s for a KV cache of %.1f GB",
            self._size / 1e9,
            weights,
            self._size / 1e6 / max(weights, 1e-3),
            reading,
            weights - reading,
            self.seconds["cache"],
            cache_bytes / 1e9,
        )
