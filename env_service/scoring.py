"""Scoring of a group's completions by the reward services: answers become records, failures those of the lease.

The client of the reward services, as configured.
"""

import asyncio
from collections.abc import Sequence
from itertools import islice

from env_service.config import EnvServiceConfig
from env_service.outcomes import DataFailure, InfrastructureFailure
from protocol.rewards import ScoreItem
from protocol.trajectories import MAX_COMPONENTS, MAX_VERSION_CHARS, RewardRecord
from services.http.calls import Backoff
from services.http.metrics import Metrics
from services.http.tls import client_tls
from services.rewards.client import RewardClient
from services.rewards.items import Scored
from services.rewards.settings import ClientSettings, HedgeSettings, RewardService


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


def reward_client(config: EnvServiceConfig, *, metrics: Metrics) -> RewardClient:
    """A client of all reward services that the configuration names, those for certain verifiers among them."""
    return RewardClient(
        config.reward_urls,
        services=[
            RewardService(url=given.url, verifiers=given.verifiers, token=given.token) for given in config.rewards
        ],
        token=config.reward_token,
        settings=client_settings(config),
        metrics=metrics,
        tls=client_tls(config.http.tls),
    )


def client_settings(config: EnvServiceConfig) -> ClientSettings:
    """How much is tried. There is no end to its patience: a rollout has a deadline of its own."""
    retry, scoring = config.retry, config.scoring
    return ClientSettings(
        deadline_s=retry.reward_timeout_s,
        patience_s=None,
        attempts=retry.reward_attempts,
        item_attempts=retry.reward_item_attempts,
        batch_items=scoring.batch_items,
        batch_wait_s=scoring.batch_wait_s,
        requests=4 * config.capacity,
        hedging=_hedging(config),
        backoff=Backoff(first_s=retry.backoff_s, max_s=retry.backoff_max_s, sleep=asyncio.sleep),
    )


def _hedging(config: EnvServiceConfig) -> HedgeSettings | None:
    scoring = config.scoring
    if scoring.hedge_share == 0:
        return None
    return HedgeSettings(after_s=scoring.hedge_after_s, percentile=scoring.hedge_percentile, share=scoring.hedge_share)
