"""The environment of async_rl.py: a sum of two digits each, judged by a verifier of the reward service."""

import random

from env_service.environments.interface import Action, Opening, Step, Task, Verification
from env_service.environments.rules import Rules


class Sums:
    """Adds two numbers, and has three digits for the answer."""

    rules = Rules(max_turns=1, turn_tokens=5)
    roles = ()  # plain text

    def reset(self, task: Task, seed: int) -> Opening:
        """The sum that the task's seed draws."""
        first, second = random.Random(task.seed).choices(range(100), k=2)
        self._answer = f"{first + second:03d}"
        return Opening(f"{first:02d}+{second:02d}=")

    def step(self, action: Action) -> Step:
        """Ends at once: the verifier compares what was said with the answer."""
        return Step(verification=Verification("exact_match", {"answer": self._answer}))
