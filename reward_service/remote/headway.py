"""The verifier of another Headway reward service, through the client library."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import BaseModel, ConfigDict

from protocol.rewards import ScoreError, ScoreItem
from reward_service.endpoints.endpoint import api_key
from reward_service.lanes.contract import Lane, Opener, Surroundings
from reward_service.remote.config import RemoteConfig
from reward_service.verifier import MAX_MESSAGE_CHARS, Outcome, Score, error_of, to_score
from services.rewards.client import RewardClient
from services.rewards.scored import Scored
from services.rewards.settings import ClientSettings


class PassedOnArguments(BaseModel):
    """Whatever the verifier there takes; it is looked at there."""

    model_config = ConfigDict(frozen=True, extra="allow")


class HeadwayLane(Lane):
    """Passes items on, those of all requests together. Each result keeps the version of the verifier there."""

    def __init__(self, config: RemoteConfig, *, client: RewardClient) -> None:
        self._url = config.url
        self._verifier = config.verifier or config.name
        self._client = client

    async def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """What the service there says, at the deadline at the latest."""
        passed_on = item.model_copy(update={"verifier": self._verifier})
        try:
            async with asyncio.timeout_at(deadline):
                (scored,) = await self._client.score([passed_on])
            return self._outcome(scored)
        except TimeoutError:
            message = f"deadline: the reward service at {self._url} gave no answer in time"
            return Outcome(result=ScoreError(kind="infrastructure", message=message))
        except Exception as error:  # noqa: BLE001  whatever goes wrong becomes an error of this item alone
            return Outcome(result=error_of(error))

    def _outcome(self, scored: Scored) -> Outcome:
        if scored.error is not None:
            message = f"{self._url}: {scored.error.message}"[:MAX_MESSAGE_CHARS]
            result: Score | ScoreError = ScoreError(kind=scored.error.kind, message=message)
        else:
            assert scored.reward is not None, "a result holds a reward or an error"
            result = to_score(Score(reward=scored.reward, components=scored.components))
        return Outcome(result=result, attempts=scored.attempts, version=scored.verifier_version or None)


def open_headway(config: RemoteConfig) -> Opener:
    """Raises UserError if there is no key where the configuration says."""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        limits = config.limits
        settings = ClientSettings(
            deadline_s=limits.request_timeout_s,
            patience_s=surroundings.config.max_deadline_s,
            attempts=limits.attempts,
            batch_items=config.batch_items,
            batch_wait_s=config.wait_s,
            requests=limits.concurrency,
        )
        async with RewardClient([config.url], token=api_key(config), settings=settings) as client:
            yield HeadwayLane(config, client=client)

    return opened
