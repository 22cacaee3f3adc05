"""Counters and histograms without locks, for the event loop, and metrics of one sample.

Those of prometheus_client may be written by any thread. Each write takes locks and searches the buckets one by one, which
for a token takes longer than the rest of the bookkeeping together.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def single_sample(kind: Family, name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    """A metric with one sample."""
    family = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


class Count(Collector):
    """A counter: `value` only grows."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self.value = 0
        self._about = (name, text, labels)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The counter with its one sample."""
        yield single_sample(CounterMetricFamily, *self._about, self.value)


class Reading(Collector):
    """A gauge or a counter, as `family` says, whose value is asked for at each scrape."""

    def __init__(
        self,
        family: Family,
        name: str,
        text: str,
        labels: Mapping[str, str],
        read: Callable[[], float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = (family, name, text, labels)
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metric with its one sample."""
        yield single_sample(*self._about, self._read())


class Histogram(Collector):
    """A histogram with the upper bounds `buckets`, to which infinity is added."""

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._about = (name, text, labels)
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value: into the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The family of one histogram."""
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=list(labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(list(labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family
