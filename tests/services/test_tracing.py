"""Traces: real requests between client and server, and a collector that takes what OpenTelemetry's exporter sends."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from protocol.status import ErrorBody, Readiness
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.tracing import current_trace, exporting_traces, lease_began, lease_ended, lease_trace, span, traced
from tests.collector import CollectedSpan, Collector

needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None,
    reason="needs OpenTelemetry: pip install 'headway[otel]'",
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as opened:
        yield opened


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """The address of a server that answers with the context that it sees."""
    app = create_app(
        service="learner", version="1", token=None, readiness=lambda: Readiness(ready=True), metrics=Metrics("learner")
    )

    async def seen(request: Request) -> JSONResponse:
        with span("inside"):
            return JSONResponse({"error": {"kind": "seen", "message": current_trace()}})

    app.add_route("/v1/seen", seen, methods=["POST"])
    with Listener(host="127.0.0.1", port=0) as listener:
        serving = asyncio.create_task(serve_http(app, listener))
        try:
            yield f"{listener.url}/v1/seen"
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def names(spans: list[CollectedSpan]) -> dict[str, str]:
    """Of each span the name of its parent; empty for the root."""
    by_id = {one.span_id: one.name for one in spans}
    return {one.name: by_id.get(one.parent, one.parent) for one in spans}


@needs_otel
async def test_a_lease_is_one_trace_over_requests_between_processes(collector: Collector) -> None:
    body = ErrorBody.model_validate({"error": {"kind": "a", "message": "b"}})
    with exporting_traces("learner", url=collector.url, share=1.0, run="one"):
        trace = lease_trace(1, 7)
        lease_began(trace)
        async with echo() as url, HttpClient() as client:
            with span("rollout", parent=trace, environment="sums"), span("turn"):
                await client.post(url, body, ErrorBody, deadline_s=60)
            outside = await client.post(url, body, ErrorBody, deadline_s=60)
        lease_began(trace, at="batch")
        lease_ended(trace, at="batch", version=3)
        lease_ended(trace, lease_id=7)

    spans = collector.spans(at_least=6)
    assert names(spans) == {
        "lease": "", "rollout": "lease", "turn": "rollout", "/v1/seen": "turn", "inside": "/v1/seen", "batch": "lease",
    }  # fmt: skip
    assert {one.trace_id for one in spans} == {trace.split("-")[1]}
    assert {one.service for one in spans} == {"headway-learner"}
    assert all(one.began <= one.ended for one in spans)
    root, turn = (next(one for one in spans if one.name == name) for name in ("lease", "turn"))
    assert root.attributes["lease_id"] == 7
    assert root.began <= turn.began <= turn.ended <= root.ended
    assert outside.error.message == "", "a request outside of a span belongs to no trace"


@needs_otel
def test_a_lease_that_is_granted_again_began_with_its_first_grant(collector: Collector) -> None:
    with exporting_traces("learner", url=collector.url, share=1.0, run="one"):
        trace = lease_trace(1, 7)
        lease_began(trace)
        with span("rollout", parent=trace, attempt=1):
            pass
        lease_began(trace)
        with span("rollout", parent=trace, attempt=2):
            pass
        lease_ended(trace, lease_id=7)

    spans = collector.spans(at_least=3)
    (root,) = (one for one in spans if one.name == "lease")
    assert all(root.began <= one.began <= one.ended <= root.ended for one in spans)


@needs_otel
def test_leases_are_drawn_alike_by_everybody_and_in_the_share_that_was_asked_for(collector: Collector) -> None:
    with exporting_traces("learner", url=collector.url, share=0.25, run="one"):
        drawn = [lease_trace(1, number) for number in range(2000)]
        assert drawn == [lease_trace(1, number) for number in range(2000)]
        assert 400 < sum(map(bool, drawn)) < 600
        assert len(set(filter(None, drawn))) == sum(map(bool, drawn))


@needs_otel
async def test_what_outlives_its_span_belongs_to_nobody_and_an_error_is_told(collector: Collector) -> None:
    async def later(gate: asyncio.Event) -> str:
        await gate.wait()
        return current_trace()

    with exporting_traces("learner", url=collector.url, share=1.0, run="one"):
        gate, tasks = asyncio.Event(), []

        def fail() -> None:
            with span("rollout", parent=lease_trace(1, 7)):
                tasks.append(asyncio.create_task(later(gate)))
                raise ValueError

        with pytest.raises(ValueError):
            fail()
        gate.set()
        assert await tasks[0] == ""
    assert collector.spans(at_least=1)[0].attributes == {"error.type": "ValueError"}


def test_where_nothing_is_exported_there_is_no_trace_and_no_header() -> None:
    assert lease_trace(1, 7) == ""
    with span("rollout", parent=f"00-{'1' * 32}-{'2' * 16}-01"):
        assert current_trace() == ""
        assert traced({"a": "b"}) == {"a": "b"}
        assert traced(None) is None


def test_where_the_packages_are_missing_it_is_said_and_the_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("services.tracing.importlib.import_module", missing)
    with exporting_traces("learner", url="http://127.0.0.1:1", share=1.0, run="one"):
        assert lease_trace(1, 7) == ""
    assert "pip install 'headway[otel]'" in caplog.text


@needs_otel
def test_a_context_that_is_none_is_ignored(collector: Collector) -> None:
    with exporting_traces("learner", url=collector.url, share=1.0, run="one"):
        for wrong in ("", "00-zz-yy-01", f"00-{'1' * 32}-{'2' * 16}-00", "x" * 1000):
            with span("rollout", parent=wrong):
                assert current_trace() == ""
