"""What the reward service says about itself at `GET /v1/status`."""

from protocol.status import QueueStatus, Report
from reward_service.scoring import Scorer


class RewardServiceStatus:
    """Reads the scorer."""

    def __init__(self, *, name: str, scorer: Scorer, most_pending: int) -> None:
        self._name = name
        self._scorer = scorer
        self._most_pending = most_pending

    def report(self) -> Report:
        """The reward service's part of its status."""
        busy, workers = self._scorer.workers()
        return Report(
            id=self._name,
            queues=(
                QueueStatus(name="items", depth=self._scorer.pending, limit=self._most_pending),
                QueueStatus(name="busy workers", depth=busy, limit=workers),
            ),
        )
