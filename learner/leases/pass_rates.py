"""Pass rates of tasks, as far as recent rollouts tell: a Beta posterior for each, which forgets.

A task that was solved in s rollouts and not in f has the posterior Beta(prior + s, prior + f), the conjugate one of
Bernoulli trials. Both counts halve in every `half_life_steps` steps of the learner, since they are those of an older
policy: what was not rolled out for long is unknown again. The spread of its rewards, which is what a group baseline
learns from, is p(1 − p); its expectation is αβ / ((α + β)(α + β + 1)).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FORGOTTEN = 0.01
"""Rollouts: of a task of which less than this is left nothing is known any more."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskCounts:
    """Rollouts of a task that solved it, and that did not, as they counted at step `at`."""

    passed: float
    failed: float
    at: int


class PassRates:
    """Keeps the counts of the tasks that were rolled out, and of no others: a look at a task costs the same whatever
    their number. `prior` are the rollouts of each kind that every task begins with; without a half-life nothing is
    forgotten.
    """

    def __init__(self, *, half_life_steps: float | None, prior: tuple[float, float] = (1.0, 1.0)) -> None:
        self._half_life_steps = half_life_steps
        self._prior = prior
        self._counts: dict[int, TaskCounts] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, task: int, *, passed: float, failed: float, at: int) -> None:
        """Rollouts of a task came in at step `at`."""
        known = self._counts.get(task)
        if known is not None:
            kept = self._kept(known, at=at)
            passed, failed, at = known.passed * kept + passed, known.failed * kept + failed, max(at, known.at)
        self._counts[task] = TaskCounts(passed, failed, at)

    def shapes(self, tasks: Sequence[int], *, at: int) -> tuple[FloatArray, FloatArray]:
        """α and β of the posteriors of these tasks at step `at`, each of the shape (tasks,)."""
        counts = np.zeros((2, len(tasks)))
        for place, task in enumerate(tasks):
            known = self._counts.get(task)
            if known is not None:
                kept = self._kept(known, at=at)
                counts[:, place] = known.passed * kept, known.failed * kept
        return self._prior[0] + counts[0], self._prior[1] + counts[1]

    def known(self, *, at: int) -> list[tuple[int, TaskCounts]]:
        """The counts of all tasks of which something is left at step `at`."""
        return [
            (task, counts)
            for task, counts in self._counts.items()
            if (counts.passed + counts.failed) * self._kept(counts, at=at) >= _FORGOTTEN
        ]

    def reset(self, known: Iterable[tuple[int, TaskCounts]]) -> None:
        """Sets the counts to these, as `known` told them; of all other tasks nothing is known."""
        self._counts = dict(known)

    def _kept(self, counts: TaskCounts, *, at: int) -> float:
        """Share of the counts that is left. A resume may take the steps back; nothing is remembered better for it."""
        if self._half_life_steps is None:
            return 1.0
        return float(2.0 ** (-max(0, at - counts.at) / self._half_life_steps))


def expected_variance(alpha: FloatArray, beta: FloatArray) -> FloatArray:
    """The expectation of p(1 − p) for p of Beta(α, β); at most 1/4."""
    total = alpha + beta
    return alpha * beta / (total * (total + 1.0))
