"""Scoring from a script, without an event loop of one's own."""

import asyncio
from collections.abc import Sequence

from pydantic import SecretStr

from protocol.rewards import ScoreItem
from services.rewards.client import RewardClient
from services.rewards.scored import Scored
from services.rewards.settings import ClientSettings


def score_sync(
    items: Sequence[ScoreItem],
    *,
    urls: Sequence[str],
    token: str | None = None,
    settings: ClientSettings | None = None,
) -> list[Scored]:
    """A reward or an error for each item, in order, by the services at `urls`; see `RewardClient.score`.

    Connections last for one call: one with many items is cheaper than many calls. Not from within an event loop.
    """

    async def score() -> list[Scored]:
        secret = None if token is None else SecretStr(token)
        async with RewardClient(urls, token=secret, settings=settings) as client:
            return await client.score(items)

    return asyncio.run(score())
