"""Prometheus metrics of one process, in a registry of its own, named `headway_<process>_<what>_<unit>`."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Makes the metrics of a process. A name that is made twice is a ValueError."""

    def __init__(self, process: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"headway_{process.replace('-', '_')}_"

    def counter(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Counter:
        """A number that only rises; `name` says what is counted (`refused_requests`), `_total` is appended."""
        return Counter(self._prefix + name, documentation, labels, registry=self.registry)

    def gauge(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Gauge:
        """A number that rises and falls."""
        return Gauge(self._prefix + name, documentation, labels, registry=self.registry)

    def histogram(
        self, name: str, documentation: str, *, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """A distribution; `name` ends in its unit (`step_seconds`), `buckets` are upper bounds in that unit."""
        return Histogram(self._prefix + name, documentation, labels, buckets=tuple(buckets), registry=self.registry)
