"""The GPUs of a process as metrics."""

from collections.abc import Sequence

from prometheus_client import Gauge

from protocol.status import GpuStatus
from services.http.metrics import Metrics


class GpuMetrics:
    """Shows the GPUs of a process as its metrics; of one that holds none, no series."""

    def __init__(self, metrics: Metrics) -> None:
        self._busy = metrics.gauge(
            "gpu_busy_ratio",
            "Share of the last second or less in which a kernel ran on a GPU that this process or a child of it holds, "
            "whoever's it was.",
            labels=("gpu",),
        )
        self._memory = metrics.gauge(
            "gpu_memory_bytes", "Memory in use on a GPU that this process or a child of it holds.", labels=("gpu",)
        )
        self._shown: dict[Gauge, set[str]] = {self._busy: set(), self._memory: set()}

    def show(self, gpus: Sequence[GpuStatus]) -> None:
        """Shows these, and no others any more."""
        for gauge, values in (
            (self._busy, {gpu.index: gpu.busy_share for gpu in gpus}),
            (self._memory, {gpu.index: gpu.memory_bytes for gpu in gpus}),
        ):
            for index, value in values.items():
                if value is not None:
                    gauge.labels(gpu=str(index)).set(value)
            known = {str(index) for index, value in values.items() if value is not None}
            for gone in self._shown[gauge] - known:
                gauge.remove(gone)
            self._shown[gauge] = known
