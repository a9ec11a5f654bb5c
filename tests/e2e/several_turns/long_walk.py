"""A long conversation of slow steps, which notes what it is asked, with the process that asks."""

import asyncio
import os
from pathlib import Path

from env_service.environments.interface import Action, Opening, Step, Task
from env_service.environments.rules import Rules

TURNS = 12


def note_process() -> None:
    """Appends the process to the test's file."""
    with Path(os.environ["STEPS"]).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


class LongWalk:
    """Shows digits, one after the other, whatever is said; each turn earns a little."""

    rules = Rules(max_turns=TURNS, turn_tokens=1, replayable=True)
    roles = ()

    def reset(self, task: Task, seed: int) -> Opening:
        self._digit = task.seed % 10
        self._turns = 0
        return Opening(f"{self._digit}=")

    async def step(self, action: Action) -> Step:
        note_process()
        await asyncio.sleep(0.3)
        self._turns += 1
        self._digit = (self._digit + 1) % 10
        reward = float(action.text == str(self._digit)) / TURNS
        if self._turns == TURNS:
            return Step(reward=reward, stop="over")
        return Step(f"{self._digit}=", reward=reward)
