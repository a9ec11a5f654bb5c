"""A chain of sums: each adds to what the policy said before, and only the last answer counts."""

import copy
import random
from typing import Self

from env_service.environments.interface import Action, Opening, Step, Task
from env_service.environments.rules import Rules


class Chain:
    """Three sums of two digits. An early mistake spoils all that comes after it, and no reward says where it was."""

    rules = Rules(max_turns=3, turn_tokens=5)
    roles = ()  # it says plain text

    def reset(self, task: Task, seed: int) -> Opening:
        first, *self._rest = random.Random(task.seed).choices(range(34), k=4)
        self._total = sum((first, *self._rest))
        return Opening(f"{first:02}+{self._rest.pop(0):02}=")

    def step(self, action: Action) -> Step:
        said = int(action.text) if action.text.isdecimal() else 0
        if not self._rest:
            return Step(reward=float(said == self._total), stop="done")
        return Step(f"{said % 100:02}+{self._rest.pop(0):02}=", invalid=not action.text.isdecimal())

    def fork(self) -> Self:
        """All that it is stands in the instance."""
        return copy.deepcopy(self)
