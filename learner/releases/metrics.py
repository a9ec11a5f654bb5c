"""The metrics of releases and of what users say of them."""

from collections.abc import Callable
from typing import get_args

from learner.releases.history import ReleaseEvent
from protocol.model import PolicyVersion
from services.http.metrics import Metrics, one_label


class ReleaseMetrics:
    """Counts what became of candidates, and shows the released version as it is when somebody looks."""

    def __init__(self, metrics: Metrics) -> None:
        self._released = metrics.gauge("released_version", "Number of the version that users get; -1 before the first.")
        self._released.set(-1)
        self._events = metrics.counter(
            "release_events",
            "Candidates that were refused, on trial or released, rollbacks, promotions that go on, first proofs.",
            labels=("event",),
            known=one_label(*get_args(ReleaseEvent)),
        )

        self._rewards = metrics.counter(
            "user_rewards",
            "Rewards that users gave for answers, by what became of them.",
            labels=("outcome",),
            known=one_label("kept", "repeated", "refused"),
        )

    def released(self, version: Callable[[], str | None]) -> None:
        """Shows the released version as it is when somebody looks; to be called once."""
        self._released.set_function(lambda: -1 if (named := version()) is None else PolicyVersion.parse(named).number)

    def rated(self, outcome: str) -> None:
        """Counts a user's reward."""
        self._rewards.labels(outcome=outcome).inc()

    def noted(self, event: str, version: str, text: str) -> None:
        """Counts an event."""
        self._events.labels(event=event).inc()
