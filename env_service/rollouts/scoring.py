"""Scoring of a group's completions by the reward services: answers become records, failures those of the lease."""

from collections.abc import Sequence
from itertools import islice

from env_service.rollouts.outcomes import DataFailure, InfrastructureFailure
from protocol.rewards import ScoreItem
from protocol.trajectories import MAX_COMPONENTS, MAX_VERSION_CHARS, RewardRecord
from services.rewards.client import RewardClient
from services.rewards.items import Scored


class Scoring:
    """The scoring of groups. It waits for as long as no service answers: the rollout's own time bounds it."""

    def __init__(self, client: RewardClient) -> None:
        self._client = client

    async def score(self, items: Sequence[ScoreItem]) -> list[RewardRecord]:
        """A record for each item, in order: a reward, or the error that a service answered with.

        Raises DataFailure when the services refuse an item, InfrastructureFailure when the attempts are used up.
        """
        scored = await self._client.score(items)
        for one in scored:
            if one.error is not None and not one.answered:
                raise (DataFailure if one.error.kind == "user" else InfrastructureFailure)(one.error.message)
        return [_record(one) for one in scored]


def _record(scored: Scored) -> RewardRecord:
    return RewardRecord(
        reward=scored.reward,
        # A verifier of many parts may say more than a record holds: its reward is worth more than the last of them.
        components=dict(islice(scored.components.items(), MAX_COMPONENTS)),
        verifier=scored.verifier,
        verifier_version=scored.verifier_version[:MAX_VERSION_CHARS],
        service_id=scored.service_id,
        endpoint=scored.endpoint,
        latency_s=scored.latency_s,
        attempts=scored.attempts,
        error_kind=scored.error.kind if scored.error else None,
        error=scored.error.message if scored.error else None,
    )
