"""Metrics for Prometheus, in a registry of their own, named `headway_<process>_<what>_<unit>`.

Beside its own, each process shows `process_*` (memory, CPU, files, start) and `headway_build_info`. A counter with
labels is made with the values that are known: a series that begins at its first event hides that event from Prometheus,
which sees a rise between two scrapes only.
"""

import importlib.metadata
import platform
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_MAX_PEERS = 1024
_MAX_LEFT = 32

Known = Iterable[Sequence[str]]
"""Values of a counter's labels, one row a series."""


class PeerCounter:
    """A counter by peer, whose names come and go. Those that left stay a while, so that a scrape sees their last count;
    of too many, the one not counted for longest is removed.
    """

    def __init__(self, counter: Counter, *, most: int = _MAX_PEERS, most_left: int = _MAX_LEFT) -> None:
        self._counter = counter
        self._most = most
        self._most_left = most_left
        self._names: dict[str, None] = {}

    def inc(self, name: str) -> None:
        """Counts one more for the peer of this name."""
        self._see(name)
        self._counter.labels(name).inc()

    def present(self, names: Collection[str]) -> None:
        """These are there now, with a series each; of the others only those that left last keep theirs."""
        for name in names:
            self._see(name)
        left = [name for name in self._names if name not in names]
        for name in left[: max(0, len(left) - self._most_left)]:
            self._remove(name)

    def _see(self, name: str) -> None:
        self._names.pop(name, None)
        self._names[name] = None
        self._counter.labels(name)
        if len(self._names) > self._most:
            self._remove(next(iter(self._names)))

    def _remove(self, name: str) -> None:
        del self._names[name]
        self._counter.remove(name)


class Distribution(Collector):  # type: ignore[misc]
    """A histogram that takes many equal values at once, from any thread. `buckets` are upper bounds, rising."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._buckets = (*map(float, buckets), float("inf"))
        self._counts = [0] * len(self._buckets)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, value: float, count: int = 1) -> None:
        """Takes `count` values of this size."""
        place = next(index for index, bound in enumerate(self._buckets) if value <= bound)
        with self._lock:
            self._counts[place] += count
            self._sum += value * count

    def describe(self) -> Iterator[Metric]:
        """Its name, without its values."""
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        """As it stands."""
        with self._lock:
            counts, total = tuple(self._counts), self._sum
        below = [sum(counts[: place + 1]) for place in range(len(counts))]
        buckets = [(floatToGoString(bound), count) for bound, count in zip(self._buckets, below, strict=True)]
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)


class LateGauge(Collector):  # type: ignore[misc]
    """A gauge without a series until it is set: to show 0 of a number that nobody knows yet would be wrong."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self._value: float | None = None

    def set(self, value: float) -> None:
        """Shows this from now on; from any thread."""
        self._value = float(value)

    def describe(self) -> Iterator[Metric]:
        """Its name, without its value."""
        yield GaugeMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        """As it stands."""
        yield GaugeMetricFamily(self._name, self._documentation, value=self._value)


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


class _ByLabel(Collector):  # type: ignore[misc]
    """Numbers by a label that somebody else keeps, gauges or counters."""

    def __init__(
        self, name: str, documentation: str, *, label: str, read: Callable[[], Mapping[str, float]], counts: bool
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._read = read
        self._family = CounterMetricFamily if counts else GaugeMetricFamily

    def describe(self) -> Iterator[Metric]:
        """Its name, without reading anything."""
        yield self._family(self._name, self._documentation, labels=[self._label])

    def collect(self) -> Iterator[Metric]:
        """As they stand."""
        family = self._family(self._name, self._documentation, labels=[self._label])
        for value, number in self._read().items():
            family.add_metric([value], number)
        yield family


class Rises(Collector):  # type: ignore[misc]
    """A counter of how much numbers that somebody else keeps have risen since `follow`; they may fall as well."""

    def __init__(self, name: str, documentation: str, *, label: str) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._read: Callable[[], Mapping[str, float]] = dict
        self._last: Mapping[str, float] = {}
        self._sums: dict[str, float] = {}

    def follow(self, read: Callable[[], Mapping[str, float]]) -> None:
        """The numbers by the label's value, as they are whenever somebody looks; to be called once."""
        self._read, self._last = read, read()
        self._sums = dict.fromkeys(self._last, 0.0)

    def describe(self) -> Iterator[Metric]:
        """Its name, without reading anything."""
        yield CounterMetricFamily(self._name, self._documentation, labels=[self._label])

    def collect(self) -> Iterator[Metric]:
        """Collects what has risen up to now."""
        now = self._read()
        for value in now:
            self._sums[value] = self._sums.get(value, 0.0) + max(0.0, now[value] - self._last.get(value, 0.0))
        self._last = now
        family = CounterMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, total in self._sums.items():
            family.add_metric([value], total)
        yield family


class Metrics:
    """Makes the metrics of a process. A name that is made twice is a ValueError. `run` is the run's name."""

    def __init__(self, process: str, *, run: str = "") -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._prefix = f"headway_{process.replace('-', '_')}_"
        ProcessCollector(registry=self.registry)
        info = Gauge(
            "headway_build_info",
            "Always 1; its labels tell the process, its release, its Python and its run.",
            ("process", "version", "python", "run"),
            registry=self.registry,
        )
        info.labels(process, importlib.metadata.version("headway"), platform.python_version(), run).set(1)

    def counter(self, name: str, documentation: str, *, labels: Sequence[str] = (), known: Known = ()) -> Counter:
        """A number that only rises; `name` says what is counted (`refused_requests`), `_total` is appended.

        `known` are values of the labels, in their order, that are shown before the first event.
        """
        counter = Counter(self._prefix + name, documentation, labels, registry=self.registry)
        for values in known:
            counter.labels(*values)
        return counter

    def count(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A counter that is kept elsewhere, and read when somebody looks."""
        self.registry.register(_Count(self._prefix + name, documentation, read))

    def by_label(
        self,
        name: str,
        documentation: str,
        *,
        label: str,
        read: Callable[[], Mapping[str, float]],
        counts: bool = False,
    ) -> None:
        """Gauges by a label, or `counts`, counters, that are kept elsewhere and read when somebody looks."""
        self.registry.register(_ByLabel(self._prefix + name, documentation, label=label, read=read, counts=counts))

    def rises(self, name: str, documentation: str, *, label: str) -> Rises:
        """A counter of the rises of numbers that are kept elsewhere."""
        made = Rises(self._prefix + name, documentation, label=label)
        self.registry.register(made)
        return made

    def gauge(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Gauge:
        """A number that rises and falls."""
        return Gauge(self._prefix + name, documentation, labels, registry=self.registry)

    def late_gauge(self, name: str, documentation: str) -> LateGauge:
        """A number that rises and falls, and that nobody knows at first: until it is set there is no series."""
        made = LateGauge(self._prefix + name, documentation)
        self.registry.register(made)
        return made

    def histogram(
        self, name: str, documentation: str, *, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """A distribution; `name` ends in its unit (`step_seconds`), `buckets` are upper bounds in that unit.

        With a bound below 0 it has no sum, which could fall.
        """
        return Histogram(self._prefix + name, documentation, labels, buckets=tuple(buckets), registry=self.registry)

    def distribution(self, name: str, documentation: str, *, buckets: Sequence[float]) -> Distribution:
        """A histogram whose values come many at a time."""
        made = Distribution(self._prefix + name, documentation, buckets=buckets)
        self.registry.register(made)
        return made


def one_label(*values: str) -> list[tuple[str]]:
    """`known` of a counter with one label."""
    return [(value,) for value in values]
