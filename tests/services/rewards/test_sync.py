"""Scoring from a script."""

import asyncio

from services.rewards.client import score_sync
from tests.services.rewards.scripted import ScriptedService, serving
from tests.services.rewards.test_client import items, rewards


async def test_a_script_scores_without_an_event_loop() -> None:
    async with serving(service := ScriptedService()) as urls:
        results = await asyncio.to_thread(score_sync, items("a", "ab"), urls=urls, token="secret")

    assert rewards(results) == [1.0, 2.0]
    assert service.asked[0].http.headers["Authorization"] == "Bearer secret"
