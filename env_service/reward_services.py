"""The client of the reward services, as configured."""

import asyncio

from env_service.config import EnvServiceConfig
from services.http.calls import Backoff
from services.http.metrics import Metrics
from services.http.tls import client_tls
from services.rewards.client import RewardClient
from services.rewards.settings import ClientSettings, HedgeSettings, RewardService


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
