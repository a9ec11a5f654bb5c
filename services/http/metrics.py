"""Prometheus metrics of one process, in a registry of its own, named `headway_<process>_<what>_<unit>`."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_MOST_PEERS = 1024


class PeerCounter:
    """A counter by peer, whose names come and go: of too many, the one not counted for longest is removed."""

    def __init__(self, counter: Counter, *, most: int = _MOST_PEERS) -> None:
        self._counter = counter
        self._most = most
        self._names: dict[str, None] = {}

    def inc(self, name: str) -> None:
        """Counts one more for the peer of this name."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._most:
            oldest = next(iter(self._names))
            del self._names[oldest]
            self._counter.remove(oldest)
        self._counter.labels(name).inc()


class _Count(Collector):  # type: ignore[misc]
    """A counter that somebody else keeps."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        self._name = name
        self._documentation = documentation
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Its name, without reading it."""
        yield CounterMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        """As it stands."""
        yield CounterMetricFamily(self._name, self._documentation, value=self._read())


class Metrics:
    """Makes the metrics of a process. A name that is made twice is a ValueError."""

    def __init__(self, process: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"headway_{process.replace('-', '_')}_"

    def counter(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Counter:
        """A number that only rises; `name` says what is counted (`refused_requests`), `_total` is appended."""
        return Counter(self._prefix + name, documentation, labels, registry=self.registry)

    def count(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A counter that is kept elsewhere, and read when somebody looks."""
        self.registry.register(_Count(self._prefix + name, documentation, read))

    def gauge(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Gauge:
        """A number that rises and falls."""
        return Gauge(self._prefix + name, documentation, labels, registry=self.registry)

    def histogram(
        self, name: str, documentation: str, *, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """A distribution; `name` ends in its unit (`step_seconds`), `buckets` are upper bounds in that unit."""
        return Histogram(self._prefix + name, documentation, labels, buckets=tuple(buckets), registry=self.registry)
