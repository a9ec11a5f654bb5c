"""Calls to the engine's process and its workers, each with a deadline: a process that is stopped keeps its sockets."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from vllm.v1.engine.exceptions import EngineDeadError

from generator.gated_llm import GatedLLM
from generator.weight_plan import WeightSyncError

POLL_FIRST_S = 0.002
POLL_MOST_S = 0.02

Answer = TypeVar("Answer")


class EngineGone(Exception):
    """The engine's process has died. The generator has to be started again."""


class EngineCalls:
    """Waits for answers of one engine. Raises WeightSyncError if they do not come in time, and EngineGone."""

    def __init__(self, *, llm: GatedLLM, stall_timeout_s: float) -> None:
        self._llm = llm
        self.stall_timeout_s = stall_timeout_s

    async def answer(self, call: Awaitable[Answer], *, more_s: float = 0.0) -> Answer:
        """The answer to `call`. One that is given up was sent all the same, and takes place when the engine goes on."""
        deadline_s = self.stall_timeout_s + more_s
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError as error:
            raise WeightSyncError(f"the engine of this generator did not answer within {deadline_s:g} s") from error
        except EngineDeadError as error:
            raise EngineGone(str(error)) from error

    async def told(self, call: Awaitable[list[str]]) -> None:
        """For a call that each worker answers with why it failed, or nothing."""
        reasons = [reason for reason in await self.answer(call) if reason]
        if reasons:
            raise WeightSyncError(reasons[0])

    async def settled(self, *, deadline_s: float) -> None:
        """Polls the workers until their background operation has ended; raises WeightSyncError if one failed."""
        deadline = time.monotonic() + deadline_s
        pause_s = POLL_FIRST_S
        while True:
            answers = await self.answer(self._llm.collective_rpc("headway_progress"))
            reasons = [reason for _, reason in answers if reason]
            if reasons:
                raise WeightSyncError(reasons[0])
            if all(ended for ended, _ in answers):
                return
            if time.monotonic() > deadline:
                raise WeightSyncError(f"the workers were not done within {deadline_s} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MOST_S)
