"""The HTTP applications and the metrics of the four processes, made without starting one.

Nothing behind a route is there: handlers are described and never called.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from prometheus_client import Counter, Gauge, Histogram, generate_latest

from env_service.agents.routes import add_session_routes
from env_service.checkpoints.records import RecordMetrics
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool
from generator.engine.records import EngineCounters
from generator.feedback import ServedLine
from generator.routes import add_feedback_route, add_token_routes
from generator.routes import add_weight_routes as add_sync_routes
from generator.serving import GeneratorMetrics
from learner.releases.metrics import ReleaseMetrics
from learner.releases.routes import add_feedback_routes, add_release_routes
from learner.reports.status import LearnerMetrics
from learner.teachers.teachers import TeacherMetrics
from learner.tenants.load import NO_LOAD, TenantMetrics
from learner.tenants.served_adapters import add_adapter_routes
from learner.weights.published import add_routes as add_learner_routes
from learner.weights.tree import add_tree_routes
from protocol.status import Kind, Readiness, Report
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.service import build_app
from reward_service.verifier.lanes import make_metrics
from services.http.app import create_app
from services.http.gpu_metrics import GpuMetrics
from services.http.metrics import Distribution, Known, LateGauge, Metrics, Rises
from services.http.status import RecentFailures, add_status_route
from services.http.waiting import Waiting
from services.rewards.items import RewardMetrics

_ABSENT: Any = None
_STILL = EngineCounters(
    running=0, waiting=0, tokens_total=0, completions_total=0, cached_tokens_total=0, cache_queries_total=0,
    idle_s=0.0, uptime_s=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A metric as Prometheus shows it; `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    documentation: str


class _Noted(Metrics):
    """Notes what is made."""

    def __init__(self, process: str) -> None:
        super().__init__(process)
        self.made: list[Metric] = []

    def counter(self, name: str, documentation: str, *, labels: Sequence[str] = (), known: Known = ()) -> Counter:
        self._note(f"{name}_total", "counter", labels, documentation)
        return super().counter(name, documentation, labels=labels, known=known)

    def rises(self, name: str, documentation: str, *, label: str) -> Rises:
        self._note(f"{name}_total", "counter", (label,), documentation)
        return super().rises(name, documentation, label=label)

    def by_label(
        self,
        name: str,
        documentation: str,
        *,
        label: str,
        read: Callable[[], Mapping[str, float]],
        counts: bool = False,
    ) -> None:
        if counts:
            self._note(f"{name}_total", "counter", (label,), documentation)
        else:
            self._note(name, "gauge", (label,), documentation)
        super().by_label(name, documentation, label=label, read=read, counts=counts)

    def distribution(self, name: str, documentation: str, *, buckets: Sequence[float]) -> Distribution:
        self._note(name, "histogram", (), documentation)
        return super().distribution(name, documentation, buckets=buckets)

    def count(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        self._note(f"{name}_total", "counter", (), documentation)
        super().count(name, documentation, read)

    def gauge(self, name: str, documentation: str, *, labels: Sequence[str] = ()) -> Gauge:
        self._note(name, "gauge", labels, documentation)
        return super().gauge(name, documentation, labels=labels)

    def late_gauge(self, name: str, documentation: str) -> LateGauge:
        self._note(name, "gauge", (), documentation)
        return super().late_gauge(name, documentation)

    def histogram(
        self, name: str, documentation: str, *, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        self._note(name, "histogram", labels, documentation)
        return super().histogram(name, documentation, buckets=buckets, labels=labels)

    def _note(self, name: str, kind: str, labels: Sequence[str], documentation: str) -> None:
        self.made.append(Metric(self._prefix + name, kind, tuple(labels), documentation))


@dataclass(frozen=True)
class Described:
    """Metrics that a process shows at its HTTP address; `shown` is what a scrape sees before the first event."""

    app: FastAPI
    metrics: tuple[Metric, ...]
    shown: str


def described() -> Mapping[str, Described]:
    """All four, by name."""
    return {
        "learner": _learner(),
        "generator": _generator(),
        "reward-service": asyncio.run(_reward_service()),
        "env-service": _env_service(),
    }


def _learner() -> Described:
    metrics = _Noted("learner")
    LearnerMetrics(metrics)
    ReleaseMetrics(metrics)
    TeacherMetrics(metrics)
    TenantMetrics(metrics, read=lambda: NO_LOAD)
    app = _app("learner", metrics)
    add_learner_routes(app, fleet=_ABSENT, shelf=_ABSENT)
    add_tree_routes(app, folder=_ABSENT)
    add_release_routes(app, releases=_ABSENT)
    add_feedback_routes(app, store=_ABSENT, counted=_ABSENT)
    add_adapter_routes(app, _ABSENT)
    return _finished("learner", app, metrics)


def _generator() -> Described:
    metrics = _Noted("generator")
    engine: Any = SimpleNamespace(counters=lambda: _STILL)
    GeneratorMetrics(metrics, engine=engine)
    GpuMetrics(metrics)
    ServedLine(learner="", client=_ABSENT, metrics=metrics)
    app = _app("generator", metrics)
    add_token_routes(app, serving=_ABSENT, scoring=_ABSENT)
    add_sync_routes(app, sync=_ABSENT, instance="")
    add_feedback_route(app, learner=_ABSENT, client=_ABSENT)
    return _finished("generator", app, metrics)


async def _reward_service() -> Described:
    metrics, config = _Noted("reward-service"), RewardServiceConfig()
    registry = build_registry(config)
    scorer = Scorer(registry=registry, config=config, metrics=make_metrics(metrics), service_id="described")
    app = build_app(
        config=config, registry=registry, scorer=scorer, metrics=metrics, readiness=_ready, version="described"
    )
    GpuMetrics(metrics)
    return _finished("reward-service", app, metrics)


def _env_service() -> Described:
    metrics = _Noted("env-service")
    RolloutMetrics(metrics)
    RecordMetrics(metrics)
    RewardMetrics(metrics)
    RuntimePool(RuntimesConfig()).show(metrics)
    app = _app("env-service", metrics)
    add_session_routes(app, sessions=_ABSENT)
    return _finished("env-service", app, metrics)


def _app(process: str, metrics: Metrics) -> FastAPI:
    return create_app(service=process, version="described", token=None, readiness=_ready, metrics=metrics)


def _finished(process: Kind, app: FastAPI, metrics: _Noted) -> Described:
    add_status_route(
        app, service=process, version="described", waits=Waiting(), failures=RecentFailures(), stopping=lambda: False,
        provider=lambda: Report(id="described"),
    )  # fmt: skip
    return Described(app=app, metrics=tuple(metrics.made), shown=generate_latest(metrics.registry).decode("utf-8"))


def _ready() -> Readiness:
    return Readiness(ready=True)
