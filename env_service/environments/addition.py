"""Two-digit addition: the smallest task on which learning shows.

The smallest environment: one prompt, one completion, one verifier.
"""

import numpy as np

from env_service.environments.interface import Action, Prompt, Step, Task, Verification
from protocol.trajectories import Purpose

_PAIRS = 10_000
_EVALUATION = 2_000
_SPLIT_SEED = 20_250_101  # part of the task's definition: with another one, old models have seen the evaluation tasks


def split() -> tuple[list[int], list[int]]:
    """The pairs `100 a + b` of the training and of the evaluation tasks, 8,000 and 2,000, the same at every call."""
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(_PAIRS).tolist()
    return order[_EVALUATION:], order[:_EVALUATION]


class Addition:
    """`37+48=` is to be continued with `085`; every pair of numbers from 00 to 99 is one task."""

    def __init__(self) -> None:
        self._train, self._evaluation = split()

    @property
    def train_tasks(self) -> int:
        return len(self._train)

    @property
    def evaluation_tasks(self) -> int:
        return len(self._evaluation)

    def task(self, purpose: Purpose, index: int) -> Task:
        """Raises IndexError beyond the number of tasks."""
        left, right = divmod((self._train if purpose == "train" else self._evaluation)[index], 100)
        answer = f"{left + right:03d}"
        return Task(prompt=f"{left:02d}+{right:02d}=", verification=Verification("exact_match", {"answer": answer}))


class SingleTurn:
    """Opens with the task's prompt and ends with the first completion, which the task's verifier judges."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def reset(self, task: Task, seed: int) -> Prompt:
        """The task's prompt; the seed changes nothing."""
        self._task = task
        return task.prompt

    def step(self, action: Action) -> Step:
        """The end, whatever the action was."""
        assert self._task is not None, "step before reset"
        return Step(verification=self._task.verification)
