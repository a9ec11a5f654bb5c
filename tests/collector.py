"""An OpenTelemetry collector: takes spans as the exporter sends them, by OTLP over HTTP, and keeps them."""

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class CollectedSpan:
    """Ids in hex, `parent` empty for a root; times in nanoseconds since 1970."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]


class Collector:
    """Listens on a port of its own while it is open."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._came = threading.Condition()
        collector = self

        class CollectorHandler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces", self.path
                collector._take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), CollectorHandler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self, *, at_least: int = 0) -> list[CollectedSpan]:
        """Waits for so many spans; returns all that have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self._spans) >= at_least, timeout=60), self._spans
            return list(self._spans)

    def _take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                found += [_span(one, service) for one in scope.spans]
        with self._came:
            self._spans += found
            self._came.notify_all()


def _span(one: Any, service: str) -> CollectedSpan:
    return CollectedSpan(
        name=one.name,
        service=service,
        trace_id=one.trace_id.hex(),
        span_id=one.span_id.hex(),
        parent=one.parent_span_id.hex(),
        began=one.start_time_unix_nano,
        ended=one.end_time_unix_nano,
        attributes=_values(one.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
