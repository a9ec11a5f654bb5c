"""A reward model as a verifier of the service."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reward_service.lanes.contract import Lane, Surroundings, Verifier
from reward_service.reward_models.arguments import RewardModelArguments
from reward_service.reward_models.config import RewardModelConfig
from reward_service.reward_models.folder import open_reward_model
from reward_service.reward_models.lane import LaneEvents, open_lane

logger = logging.getLogger(__name__)


def reward_model_verifier(given: RewardModelConfig) -> Verifier:
    """Its version holds the fingerprint of its files, so that each reward says which model gave it.

    Reads all of the model's files. Raises UserError for a directory that holds no reward model.
    """
    model = open_reward_model(given)
    logger.info("reward model %s: %s, fingerprint %s", given.name, given.path, model.fingerprint)

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        events = LaneEvents(
            killed=metrics.killed_workers.labels(given.name).inc, batch=metrics.batch_items.labels(given.name).observe
        )
        async with open_lane(model=model, events=events, max_waiting=surroundings.config.max_pending_items) as lane:
            yield lane

    return Verifier(
        name=given.name,
        version=f"1+{model.fingerprint}",
        description="What a reward model says about the completion: a sequence-classification model with one label.",
        arguments=RewardModelArguments,
        open=opened,
    )
