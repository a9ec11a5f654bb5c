"""What a client of reward services counts."""

from services.metrics import Metrics

_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class RewardMetrics:
    """The metrics of one client, among those of its process."""

    def __init__(self, metrics: Metrics) -> None:
        self.failures = metrics.counter(
            "reward_service_failures", "Failed requests to a reward service.", labels=("endpoint",)
        )
        self.busy = metrics.counter(
            "reward_service_busy", "Requests that a reward service turned away with 429.", labels=("endpoint",)
        )
        self.rescored = metrics.counter("rescored_items", "Items asked for again after an error of the service.")
        self.request_items = metrics.histogram(
            "reward_request_items", "Items in a request to a reward service.", buckets=_ITEMS
        )
        self.hedged = metrics.counter("hedged_items", "Items asked of a second service, since the first was slow.")
        self.hedges_won = metrics.counter("hedges_won", "Items that the second service answered first.")
