"""The load of the service of tenants, as Prometheus and `GET /v1/status` show it. Nothing here waits."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from learner.tenants.service import TenantService
from services.http.metrics import Metrics


@dataclass(frozen=True)
class TenantLoad:
    """Counts of now: operations in queues and completions under way, by tenant; training models, and those of them in
    memory. `rounds`: shared passes so far, `passes`: operations that were in them.
    """

    queued: Mapping[str, int]
    sampling: Mapping[str, int]
    models: int
    resident: int
    rounds: int
    passes: int


NO_LOAD = TenantLoad(queued={}, sampling={}, models=0, resident=0, rounds=0, passes=0)


def load_of(service: TenantService) -> TenantLoad:
    """The load of a service."""
    names = [tenant.name for tenant in service.keys.tenants]
    models = service.models.by_id.values()
    return TenantLoad(
        queued={name: service.models.queue_length(name).operations for name in names},
        sampling={name: service.samples.count(name) for name in names},
        models=len(models),
        resident=sum(model.resident for model in models),
        rounds=service.training.rounds,
        passes=service.training.passes,
    )


class TenantMetrics:
    """Metrics that are read from the load when somebody looks."""

    def __init__(self, metrics: Metrics, *, tenants: Iterable[str], read: Callable[[], TenantLoad]) -> None:
        queued = metrics.gauge(
            "tenant_queued_operations", "Operations of a tenant that wait for their turn.", labels=("tenant",)
        )
        sampling = metrics.gauge(
            "tenant_completions", "Completions of a tenant that are being sampled.", labels=("tenant",)
        )
        for name in tenants:
            queued.labels(name).set_function(partial(_of, name, lambda: read().queued))
            sampling.labels(name).set_function(partial(_of, name, lambda: read().sampling))
        models = metrics.gauge("tenant_models", "Training models of all tenants.")
        models.set_function(lambda: read().models)
        resident = metrics.gauge("tenant_resident_models", "Training models in memory; others are on the disk.")
        resident.set_function(lambda: read().resident)
        metrics.count("tenant_rounds", "Passes through the model that operations shared.", lambda: read().rounds)
        metrics.count("tenant_passes", "Operations of tenants that were in a pass.", lambda: read().passes)


def _of(name: str, read: Callable[[], Mapping[str, int]]) -> int:
    return read().get(name, 0)
