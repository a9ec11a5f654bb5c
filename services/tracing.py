"""Traces for OpenTelemetry: the life of a lease, from its grant to the step that its group is trained in.

A lease's rollout, each turn, scoring, and the way of its group into a step are spans. The context goes with the lease,
and with HTTP requests as the header `traceparent` of W3C Trace Context. Only leases that are drawn have one, and
without one `span` does nothing. The library is loaded where traces are exported, and nowhere else.
"""

import hashlib
import importlib
import importlib.metadata
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

_HEADER = "traceparent"
_CONTEXT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_END_S = 2.0
_MAX_BEGAN = 65_536
_NOTHING = nullcontext()

Attribute = str | int | float | bool


@dataclass
class _Open:
    """A span under way; `context` is its own, as the header has it. Ended, it is nobody's parent any more."""

    context: str
    told: dict[str, Attribute]
    is_open: bool = True


@dataclass
class _Exporting:
    """Destination of this process's spans. `on_end` takes one of the library's."""

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
        logger.warning("run.trace_url is set, and no trace is sent: %s; pip install 'headway[otel]' has it", error)
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
        if len(_exporting.began) >= _MAX_BEGAN:  # the oldest first, of leases that came to nothing
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


def note(**told: Attribute) -> None:
    """Adds to what the span under way tells; nothing where there is none."""
    above = _current.get()
    if above is not None and above.is_open:
        above.told.update(told)


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
    own = _Open(_child_of(parent), dict(told))
    token, began_ns = _current.set(own), time.time_ns()
    try:
        yield
    except BaseException as error:
        own.told["error.type"] = type(error).__name__
        raise
    finally:
        own.is_open = False
        _current.reset(token)
        to.on_end(to.make(name, own.context, parent, began_ns, time.time_ns(), own.told))


def _child_of(context: str) -> str:
    return f"{context[:36]}{secrets.token_hex(8)}-01"
