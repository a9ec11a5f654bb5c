"""The env_service's readiness while its peers come."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

from env_service import app
from services.http.waiting import Waiting


async def _for_ever(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def _all_ready() -> tuple[str, ...]:
    return ()


async def test_between_one_peer_and_the_next_it_is_never_called_ready() -> None:
    waits = Waiting()
    quiet = SimpleNamespace(retry=SimpleNamespace(reward_timeout_s=1.0, environment_timeout_s=1.0))
    config: Any = SimpleNamespace(needs_rewards=True, learner="tcp://l", retry=quiet.retry)
    link: Any = SimpleNamespace(welcomed=False, wait_for=_for_ever, receive=_for_ever, tick=_for_ever)
    rewards: Any = SimpleNamespace(unready=_all_ready, watch=_for_ever)
    nothing: Any = SimpleNamespace(slow=lambda *_, **__: None)

    conversing = asyncio.create_task(app._converse(config, link, nothing, nothing, waits, rewards, None))
    seen = []
    for _ in range(50):
        seen.append(waits.readiness())
        await asyncio.sleep(0)
    conversing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await conversing

    assert not any(readiness.ready for readiness in seen)
    assert seen[-1].waiting_for == ("the learner at tcp://l",)
