"""The load of the service of tenants, as Prometheus and `GET /v1/status` show it. Nothing here waits.

A tenant has a series of its own while it is one of `MOST_SERIES`; what others do is counted together, so that hundreds
of tenants make no thousands of series.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from learner.tenants.service import TenantService
from services.http.metrics import Metrics

MOST_SERIES = 32
OTHERS = "(others)"
"""The label of tenants without a series of their own; no tenant can be called so."""
_FRESH_S = 0.5
_KEPT_S = 3600.0
"""A tenant that did nothing for so long gives its series to one that does something."""


@dataclass(frozen=True)
class TenantUse:
    """Totals of a tenant so far, and what it has under way; `waits_s`: how long the first of its operations waits."""

    rows: int = 0
    tokens: int = 0
    steps: int = 0
    refused: int = 0
    queued: int = 0
    completions: int = 0
    waits_s: float = 0.0

    @property
    def done(self) -> tuple[int, int, int, int]:
        """Totals alone, which only rise."""
        return self.rows, self.tokens, self.steps, self.refused


@dataclass(frozen=True)
class TenantLoad:
    """The use of each tenant, training models, and those of them in memory. `rounds`: shared passes so far, `passes`:
    operations that were in them.
    """

    tenants: Mapping[str, TenantUse]
    models: int
    resident: int
    rounds: int
    passes: int


NO_LOAD = TenantLoad(tenants={}, models=0, resident=0, rounds=0, passes=0)


def load_of(service: TenantService) -> TenantLoad:
    """The load of a service."""
    models = service.models.by_id.values()
    waits: dict[str, float] = {}
    for model in models:
        if model.ready:
            owner = model.entry.owner
            waits[owner] = max(waits.get(owner, 0.0), service.models.waited_s(model))
    return TenantLoad(
        tenants={each.name: _use(service, each.name, waits.get(each.name, 0.0)) for each in service.keys.tenants},
        models=sum(not model.entry.unloaded for model in models),
        resident=sum(model.resident for model in models),
        rounds=service.training.rounds,
        passes=service.training.passes,
    )


def _use(service: TenantService, name: str, waits_s: float) -> TenantUse:
    record = service.records.of_tenant(name)
    return TenantUse(
        rows=record.rows,
        tokens=record.tokens,
        steps=record.steps,
        refused=record.refused,
        queued=service.models.queue_length(name).operations,
        completions=service.samples.count(name),
        waits_s=waits_s,
    )


class TenantSeries:
    """Sums up the use of tenants by label: of those with a series their own, of the others together.

    A counter never falls: what a tenant does counts under the label that it has by then. `clock` is in seconds.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, TenantUse]],
        *,
        most: int = MOST_SERIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._most, self._clock = read, most, clock
        self._active: dict[str, float] = {}  # tenants with a series, by when they last did something
        self._last: dict[str, Sequence[int]] = {}
        self._sums: dict[str, list[int]] = {}
        self._seen_at = float("-inf")
        self._now: Mapping[str, TenantUse] = {}

    def totals(self, place: int) -> dict[str, float]:
        """A counter by label: 0 are rows, 1 tokens, 2 steps, 3 refused calls."""
        self._look()
        return {label: float(sums[place]) for label, sums in self._sums.items()}

    def present(
        self, of: Callable[[TenantUse], float], together: Callable[[Sequence[float]], float]
    ) -> dict[str, float]:
        """A gauge by label, of those that share one `together`."""
        self._look()
        values: dict[str, list[float]] = {label: [] for label in self._sums}
        for name, use in self._now.items():
            values.setdefault(self._label(name), []).append(of(use))
        return {label: together(several) if several else 0.0 for label, several in values.items()}

    def _look(self) -> None:
        now = self._clock()
        if now - self._seen_at < _FRESH_S:
            return  # of the same scrape
        self._seen_at, self._now = now, self._read()
        everyone = len(self._now) <= self._most
        for name, use in self._now.items():
            risen = [new - old for new, old in zip(use.done, self._last.get(name, (0,) * 4), strict=True)]
            active = any(risen) or use.queued > 0 or use.completions > 0
            self._last[name] = use.done
            if active or everyone:
                self._keep(name, now)
            sums = self._sums.setdefault(self._label(name), [0] * 4)
            for place, more in enumerate(risen):
                sums[place] += more

    def _keep(self, name: str, now: float) -> None:
        """Gives the tenant a series, if there is one or somebody's has been still for long."""
        if name not in self._active and len(self._active) >= self._most:
            oldest = min(self._active, key=lambda each: self._active[each])
            if now - self._active[oldest] < _KEPT_S:
                return
            del self._active[oldest], self._sums[oldest]
        self._active[name] = now

    def _label(self, name: str) -> str:
        return name if name in self._active else OTHERS


class TenantMetrics:
    """Metrics that are read from the load when somebody looks."""

    def __init__(self, metrics: Metrics, *, read: Callable[[], TenantLoad]) -> None:
        series = TenantSeries(lambda: read().tenants)

        def gauge(
            name: str, documentation: str, of: Callable[[TenantUse], float], together: Callable[..., float]
        ) -> None:
            metrics.by_label(name, documentation, label="tenant", read=lambda: series.present(of, together))

        def count(name: str, documentation: str, place: int) -> None:
            metrics.by_label(name, documentation, label="tenant", read=lambda: series.totals(place), counts=True)

        gauge(
            "tenant_queued_operations", "Operations of a tenant that wait for their turn.", lambda use: use.queued, sum
        )
        gauge("tenant_completions", "Completions of a tenant that are being sampled.", lambda use: use.completions, sum)
        gauge(
            "tenant_wait_age", "Seconds: how long the first of a tenant's operations has waited for its turn.",
            lambda use: use.waits_s, max,
        )  # fmt: skip
        count("tenant_rows", "Sequences of a tenant that were computed.", 0)
        count("tenant_tokens", "Tokens of a tenant that were computed.", 1)
        count("tenant_steps", "Optimizer steps of a tenant's training runs.", 2)
        count("tenant_refused_calls", "Calls of a tenant that were turned away: it had too much under way.", 3)
        models = metrics.gauge("tenant_models", "Training models of all tenants.")
        models.set_function(lambda: read().models)
        resident = metrics.gauge("tenant_resident_models", "Training models in memory; others are on the disk.")
        resident.set_function(lambda: read().resident)
        metrics.count("tenant_rounds", "Passes through the model that operations shared.", lambda: read().rounds)
        metrics.count("tenant_passes", "Operations of tenants that were in a pass.", lambda: read().passes)
