"""The metrics of releases and of what users say of them."""

from collections.abc import Callable
from typing import get_args

from learner.releases.history import ReleaseEvent
from protocol.model import PolicyVersion
from services.http.metrics import Metrics, one_label


class ReleaseMetrics:
    """Counts what became of candidates, and shows the released version as it is when somebody looks."""

    def __init__(self, metrics: Metrics, *, released: Callable[[], str | None] = lambda: None) -> None:
        gauge = metrics.gauge("released_version", "Number of the version that users get; -1 before the first.")
        gauge.set_function(lambda: -1 if (version := released()) is None else PolicyVersion.parse(version).number)
        self._events = metrics.counter(
            "release_events",
            "Candidates that were refused, on trial or released, rollbacks, promotions that go on, first proofs.",
            labels=("event",),
            known=one_label(*get_args(ReleaseEvent)),
        )

    def noted(self, event: str, version: str, text: str) -> None:
        """Counts an event."""
        self._events.labels(event=event).inc()
