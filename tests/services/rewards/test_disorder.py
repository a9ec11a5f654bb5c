"""Many calls at services that do everything wrong at once: what comes back is right, and nothing stays behind."""

import asyncio
import random
from typing import Any

import pytest

from services.rewards.settings import HedgeSettings
from tests.env_service.peers import eventually
from tests.services.rewards.scripted import (
    Answer,
    ArrivedRequest,
    breaks_off,
    fails,
    lines,
    of,
    result,
    scores,
    status,
)
from tests.services.rewards.test_client import client_of, items, scripted

CALLS = 120


def disorder(draw: random.Random) -> Answer:
    """A way to answer, drawn anew for each request; half of all are answered well."""

    async def wrong(asked: ArrivedRequest) -> Any:
        return of("mad", [result(item, id=f"{item.id}0") for item in asked.body.items])

    async def answer(asked: ArrivedRequest) -> Any:
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(draw.random() / 100, done.set)
        late = draw.sample(asked.texts, k=len(asked.texts) // 2)
        bad = draw.choice(
            [
                status(500),
                status(503),
                status(429, Retry_After="0.01"),
                breaks_off,
                wrong,
                fails(*late),
                lines(done, *late, breaks=True),
            ]
        )
        return await draw.choice([scores, lines(done, *late), bad, bad])(asked)

    return answer


@pytest.mark.parametrize("seed", range(4))
async def test_every_item_gets_its_own_reward_or_an_error_and_nothing_stays_behind(seed: int) -> None:
    draw = random.Random(seed)
    services = [scripted(always=disorder(draw)) for _ in range(3)]
    hedging = HedgeSettings(after_s=0.005, share=0.5) if seed % 2 else None
    async with client_of(*services, hedging=hedging, attempts=50, item_attempts=50, batch_items=32) as client:
        wanted = [["a" * draw.randrange(1, 200) for _ in range(draw.randrange(1, 9))] for _ in range(CALLS)]
        calls = [asyncio.create_task(client.score(items(*texts))) for texts in wanted]
        left = draw.sample(calls, k=CALLS // 6)
        await asyncio.wait([calls[0]])
        for call in left:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        await eventually(lambda: not any(service.under_way for service in services))
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    for texts, scored in zip(wanted, results, strict=True):
        if not isinstance(scored, BaseException):
            assert [one.id for one in scored] == [f"mine-{text}" for text in texts]
            assert [one.reward for one in scored] == [float(len(text)) for text in texts]
    assert sum(isinstance(scored, BaseException) for scored in results) <= len(left)
