"""A chain of sums: each adds to what the policy said before."""

import copy
import random
from typing import Self

from env_service.environments.interface import Action, Opening, Step, Task
from env_service.environments.rules import Rules


class Chain:
    """Three sums of two digits, each worth 1 if it is right."""

    rules = Rules(max_turns=3, turn_tokens=5)
    roles = ()  # it says plain text

    def reset(self, task: Task, seed: int) -> Opening:
        first, *self._rest = random.Random(task.seed).choices(range(34), k=4)
        return Opening(self._ask(first))

    def step(self, action: Action) -> Step:
        said = int(action.text) if action.text.isdecimal() else 0
        reward = float(said == self._due)
        if not self._rest:
            return Step(reward=reward, stop="done")
        return Step(self._ask(said % 100), reward=reward)

    def _ask(self, left: int) -> str:
        right = self._rest.pop(0)
        self._due = left + right
        return f"{left:02}+{right:02}="

    def fork(self) -> Self:
        """All that it is stands in the instance."""
        return copy.deepcopy(self)
