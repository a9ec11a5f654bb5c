"""What a process exports: metrics for Prometheus, and traces for OpenTelemetry.

Metrics are in a registry of their own, named `headway_<process>_<what>_<unit>`.

Beside its own, each process shows `process_*` (memory, CPU, files, start) and `headway_build_info`. A counter with
labels is made with the values that are known: a series that begins at its first event hides that event from Prometheus,
which sees a rise between two scrapes only.

A trace is the life of a lease: its rollout, each turn, scoring, and the way of its group into a step. Its context goes
with the lease, and with HTTP requests as the header `traceparent` of W3C Trace Context. Only leases that are drawn have
one, and without one `span` does nothing. The library is loaded where traces are exported, and nowhere else.
"""

import hashlib
import importlib
import importlib.metadata
import logging
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

_MOST_PEERS = 1024
_MOST_BEGAN = 65_536
_MOST_LEFT = 32

Known = Iterable[Sequence[str]]
"""Values of a counter's labels, one row a series."""


class PeerCounter:
    """A counter by peer, whose names come and go. Those that left stay a while, so that a scrape sees their last count;
    of too many, the one not counted for longest is removed.
    """

    def __init__(self, counter: Counter, *, most: int = _MOST_PEERS, most_left: int = _MOST_LEFT) -> None:
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
        """What has risen up to now."""
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

    def rises(self, name: str, documentation: str, *, label: str) -> Rises:
        """A counter of the rises of numbers that are kept elsewhere."""
        made = Rises(self._prefix + name, documentation, label=label)
        self.registry.register(made)
        return made

    def gauge(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Gauge:
        """A number that rises and falls."""
        return Gauge(self._prefix + name, documentation, labels, registry=self.registry)

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


_HEADER = "traceparent"
_CONTEXT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_END_S = 2.0
_NOTHING = nullcontext()

Attribute = str | int | float | bool


@dataclass
class _Open:
    """A span under way; `context` is its own, as the header has it. Ended, it is nobody's parent any more."""

    context: str
    is_open: bool = True


@dataclass
class _Exporting:
    """Where this process's spans go. `on_end` takes one of the library's."""

    run: str
    share: float
    make: Callable[..., Any]
    on_end: Callable[[Any], None]
    began: dict[str, int] = field(default_factory=dict)


# Of the process, as its log is: a span may be anywhere, and where none is exported it costs a look at this.
_exporting: _Exporting | None = None
_current: ContextVar[_Open | None] = ContextVar("span", default=None)


@contextmanager
def exporting_traces(process: str, *, url: str | None, share: float, run: str) -> Iterator[None]:
    """While the body runs, spans of this `share` of the leases are sent to the collector at `url`, if there is one.
    Where the packages are missing, or nobody answers there, that is said, and the process goes on without.
    """
    global _exporting
    opened = None if url is None else _opened(url, run=run, process=process)
    if opened is None:
        yield
        return
    make, processor = opened
    _exporting = _Exporting(run, share, make, processor.on_end)
    try:
        yield
    finally:
        _exporting = None
        ending = threading.Thread(target=processor.shutdown, name="traces", daemon=True)
        ending.start()  # a collector that takes nothing would hold it for half a minute
        ending.join(_END_S)


def _opened(url: str, *, run: str, process: str) -> tuple[Callable[..., Any], Any] | None:
    try:
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        api = importlib.import_module("opentelemetry.trace")
    except ImportError as error:
        log.warning("run.trace_url is set, and no trace is sent: %s; pip install 'headway[otel]' has it", error)
        return None
    resource = resources.Resource.create({"service.name": f"headway-{process}", "headway.run": run})
    exporter = otlp.OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=5)

    def context(trace: str, span: str) -> Any:
        return api.SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=api.TraceFlags(1))

    def make(name: str, own: str, parent: str, began_ns: int, ended_ns: int, told: Mapping[str, Attribute]) -> Any:
        trace, span_id = _parts(own)
        above = context(*_parts(parent)) if parent else None
        return sdk.ReadableSpan(
            name=name, context=context(trace, span_id), parent=above, resource=resource, attributes=dict(told),
            start_time=began_ns, end_time=ended_ns,
        )  # fmt: skip

    return make, export.BatchSpanProcessor(exporter)


def _parts(context: str) -> tuple[str, str]:
    found = _CONTEXT.fullmatch(context)
    assert found is not None, context
    return found[1], found[2]


def lease_trace(incarnation: int, lease_id: int) -> str:
    """The context of a training lease's trace, the same wherever it is asked for; empty if it is not drawn.

    So whoever has the lease's group needs no more than that.
    """
    if _exporting is None:
        return ""
    digest = hashlib.sha256(f"{_exporting.run}/{incarnation}/{lease_id}".encode()).hexdigest()
    drawn = int(digest[48:], 16) < _exporting.share * 2**64
    return f"00-{digest[:32]}-{digest[32:48]}-01" if drawn else ""


def lease_began(trace: str, *, at: str = "lease") -> None:
    """Notes when a stage of a lease's trace began, which ends at another place in this process.

    A lease that is granted again began with its first grant: all its attempts are in its trace.
    """
    if _exporting is not None and trace:
        if len(_exporting.began) >= _MOST_BEGAN:  # the oldest first, of leases that came to nothing
            del _exporting.began[next(iter(_exporting.began))]
        _exporting.began.setdefault(f"{at} {trace}", time.time_ns())


def lease_ended(trace: str, *, at: str = "lease", began_ns: int | None = None, **told: Attribute) -> None:
    """Exports a stage of a lease's trace: the root of it, or a child of that."""
    if _exporting is not None and trace:
        now = time.time_ns()
        noted = _exporting.began.pop(f"{at} {trace}", now)
        own, parent = (trace, "") if at == "lease" else (_child_of(trace), trace)
        _exporting.on_end(_exporting.make(at, own, parent, noted if began_ns is None else began_ns, now, told))


def span(name: str, *, parent: str = "", **told: Attribute) -> AbstractContextManager[None]:
    """A span of the trace `parent`, or of the one under way; nothing where there is none."""
    if _exporting is None:
        return _NOTHING
    above = parent if parent and _CONTEXT.fullmatch(parent) else current_trace()
    return _spanning(_exporting, name, above, told) if above else _NOTHING


def current_trace() -> str:
    """The context of the span under way; empty without one. A task that outlives its span has none."""
    above = _current.get()
    return above.context if above is not None and above.is_open else ""


def traced(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """The headers of a request, with the context of the span under way."""
    context = current_trace() if _exporting is not None else ""
    return {**(headers or {}), _HEADER: context} if context else headers


def traced_app(app: ASGIApp) -> ASGIApp:
    """Makes a request that belongs to a trace a span of it; the same app where no traces are exported."""
    if _exporting is None:
        return app
    header = _HEADER.encode()

    async def spanning(scope: Scope, receive: Receive, send: Send) -> None:
        found = next((value for name, value in scope.get("headers", ()) if name == header), b"")
        with span(scope.get("path", ""), parent=found.decode("latin-1")) if found else _NOTHING:
            await app(scope, receive, send)

    return spanning


@contextmanager
def _spanning(to: _Exporting, name: str, parent: str, told: Mapping[str, Attribute]) -> Iterator[None]:
    own = _Open(_child_of(parent))
    token, began_ns, failed = _current.set(own), time.time_ns(), {}
    try:
        yield
    except BaseException as error:
        failed = {"error.type": type(error).__name__}
        raise
    finally:
        own.is_open = False
        _current.reset(token)
        to.on_end(to.make(name, own.context, parent, began_ns, time.time_ns(), {**told, **failed}))


def _child_of(context: str) -> str:
    return f"{context[:36]}{secrets.token_hex(8)}-01"
