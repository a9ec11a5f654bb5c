"""Whether the engine's process lives, and whether it answers: a stopped process keeps its sockets, and says nothing."""

import asyncio
import logging

from generator.engine import Engine
from generator.engine_calls import EngineGone
from generator.serving import Serving

log = logging.getLogger(__name__)

_EVERY_S = 1.0


async def watch_life(engine: Engine) -> None:
    """Raises EngineGone when the engine's process has died."""
    while True:
        await asyncio.sleep(_EVERY_S)
        if not engine.is_alive:
            raise EngineGone("the engine's process has died; restart this generator")


async def watch_answers(engine: Engine, *, serving: Serving) -> None:
    """Takes the generator out of service while its engine does not answer within its deadline.

    Requests that run then are handed back, so that they go on elsewhere.
    """
    while True:
        answer = asyncio.ensure_future(engine.ping())
        try:
            done, _ = await asyncio.wait({answer}, timeout=engine.answer_timeout_s)
            if not done:
                log.error(
                    "the engine has not answered for %.0f s: out of service until it does", engine.answer_timeout_s
                )
                serving.stall()
                await engine.hand_back()
            await answer
        finally:
            answer.cancel()
        serving.answers()
        await asyncio.sleep(_EVERY_S)
