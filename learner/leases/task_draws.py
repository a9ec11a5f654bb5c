"""Draws of the tasks of leases, by what a group of each is expected to teach.

    accepted groups ─▶ pass rates ─▶ draw: of some candidates the one of the largest p(1 − p) ─▶ row ─▶ leases

A group whose rollouts are all solved, or all not, teaches a group baseline nothing; the spread of its rewards is
p(1 − p). For each lease the pass rates of some tasks, taken at random, are sampled from their posteriors (Thompson
sampling), and the task with the largest p(1 − p) is drawn: one of which little is known often looks well, and is so
tried. Only the candidates are looked at, so that a lease costs the same with a hundred tasks and with a hundred
million; their number says how sharp the choice is. A share of leases, the floor, keeps the task of the plain order:
no task is ever left out for good. In a mix the part is always that of the plain order, so that the shares stay.

A lease's task must be the same whenever it is granted again, after a death of the learner too, and a newer release of
numpy may draw otherwise. So draws are written to the run's folder before their leases are granted, some leases ahead,
and so is what groups showed, in the order in which it came: a learner that reads the file has the posterior that the
former one had. Rows that no resume needs any more are left out of the file now and then. Priors of a file stand in
the first row, like what groups showed.
"""

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from learner.leases.curriculum import solved_of
from learner.leases.disk_trouble import DiskTrouble
from learner.leases.pass_rates import PassRates, TaskCounts, expected_variance
from learner.leases.run_rows import RunRows
from learner.leases.task_priors import TaskPriors
from protocol.messages import TaskPart
from protocol.trajectories import TrajectoryGroup

logger = logging.getLogger(__name__)

FILE = "task_draws.jsonl"
_STREAM = 0x7A51
"""Beside the seed and the lease: the random numbers of draws are others than those of rollouts."""
_WINDOW = 1024
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DrawRules:
    """Of `candidates` tasks one is drawn; a share `floor` of leases keeps the task of the plain order. A rollout is
    solved with a reward of at least `success_reward`. Counts of rollouts halve in `half_life_steps` steps. `ahead`
    leases at most are drawn at once.
    """

    seed: int = 0
    candidates: int = 16
    floor: float = 0.1
    half_life_steps: float | None = 32.0
    success_reward: float = 1.0
    ahead: int = 32


@dataclass(frozen=True)
class DrawnTasks:
    """The newest draws, of 1,024 leases at most. `effective`: the number of tasks that would be drawn as unevenly if
    each were drawn equally often, (Σ n)² / Σ n² over the counts n of the tasks. `variance`: the mean of the p(1 − p)
    that was expected of them, at most 1/4.
    """

    effective: float
    variance: float


class TaskPlaces:
    """The places of the plain order, 0..count-1: consecutive parts, within whose bounds a draw stays.

    In a part of more places than tasks the tasks recur; a task goes by the first of its places. Without `parts` each
    of the `levels` is one.
    """

    def __init__(self, *, count: int, levels: int = 1, parts: Sequence[TaskPart] = ()) -> None:
        size = count // levels
        self._parts = tuple(parts) or (TaskPart(places=size, tasks=size),) * levels
        *self._firsts, self.count = (0, *accumulate(part.places for part in self._parts))

    def part_of(self, place: int) -> tuple[int, int]:
        """The first task of the part that has this place, and the number of its tasks."""
        number = bisect_right(self._firsts, place) - 1
        return self._firsts[number], self._parts[number].tasks

    def task_at(self, place: int) -> int:
        """The task of a place."""
        first, tasks = self.part_of(place)
        return first + (place - first) % tasks

    @property
    def shape(self) -> list[list[int]]:
        """Places and tasks of each part, as JSON."""
        return [[part.places, part.tasks] for part in self._parts]


class TaskDraws:
    """The task of each lease. Without `rows` nothing is remembered.

    `plain` is the place of a lease in the plain order. `needed_from` tells the first lease that a resume may still
    grant: the draws before it are forgotten at times. `priors` count where drawing begins, and not again after that.
    """

    def __init__(
        self,
        *,
        places: TaskPlaces,
        rules: DrawRules,
        plain: Callable[[int], int],
        rows: RunRows | None = None,
        needed_from: Callable[[], int] = lambda: 0,
        priors: TaskPriors | None = None,
    ) -> None:
        self._places = places
        self._rules = rules
        self._plain = plain
        self._rows = rows
        self._needed_from = needed_from
        self._undrawn = DiskTrouble(logger, over="tasks of leases are written down again: leases are granted")
        self._unshown = DiskTrouble(logger, over="what groups show of their tasks is written down again")
        self._unshortened = DiskTrouble(logger, over=f"{FILE} is written anew again: it holds what a resume needs")
        self._priors = priors
        self._prompts = {} if priors is None else priors.prompts
        self._begun_with: str | None = None
        self._begun = False
        self._first = 0
        self._drawn: list[int] = []
        self._window: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._rewrite_above = _SMALL_BYTES
        self.rates = PassRates(half_life_steps=rules.half_life_steps)
        self.newest: DrawnTasks | None = None
        """None before the first draw of this life. May be read in any thread."""
        for row in rows.read() if rows is not None else ():
            self._take_up(row)
        if priors is not None and self._begun and self._begun_with != priors.fingerprint:
            logger.warning(
                "rollouts.tasks.priors: %s counts for nothing: this run began to draw tasks with %s, and goes on from "
                "what it has seen",
                priors.path, "none" if self._begun_with is None else "another content or prior_weight",
            )  # fmt: skip

    def task_of(self, lease_id: int) -> int:
        """The same at every grant of a lease; of one that was granted before tasks were drawn, the plain order's."""
        known = self._first <= lease_id < self._end
        return self._drawn[lease_id - self._first] if known else self._plain(lease_id)

    def cover(self, *, next_lease: int, end: int, at: int) -> int:
        """Draws the tasks of leases below `end`; `next_lease` is the first that the ledger never granted, and `at` the
        learner's version. Returns the first lease that has no task: below `end` if the disk did not take the draws.
        """
        try:
            if not self._begun:
                self._begin(next_lease, at=at)
            self._forget_moved(next_lease)
            if self._end < next_lease:
                self._pass_over(next_lease, at=at)
            if self._end < end:
                self._draw(max(end - self._end, self._rules.ahead), at=at)
                self._undrawn.is_over()
                self._shorten_if_grown(next_lease, at=at)
        except OSError as error:
            self._undrawn.goes_on(
                "no lease from %d on is granted while its task cannot be written down: %s", self._end, error
            )
        return self._end

    def accepted(self, group: TrajectoryGroup, *, at: int) -> None:
        """Notes how many of a group's rollouts solved their task; `at` is the learner's version."""
        if not self._begun or group.task_index >= self._places.count:
            return
        solved, of = solved_of(group, self._rules.success_reward)
        task = self._places.task_at(group.task_index)
        self._look_at_prompt(group)
        try:
            self._write({"task": task, "passed": solved, "failed": of - solved, "at": at}, sync=False)
            self._unshown.is_over()
        except OSError as error:
            self._unshown.goes_on(
                "what groups show of their tasks is lost while it cannot be written down, from lease %d on: %s",
                group.lease_id,
                error,
            )

    @property
    def _end(self) -> int:
        return self._first + len(self._drawn)

    def _write(self, row: Mapping[str, Any], *, sync: bool = True) -> None:
        """Writes a row, and takes it up as a later life will."""
        if self._rows is not None:
            self._rows.append(row, sync=sync)
        self._take_up(row)

    def _take_up(self, row: Mapping[str, Any]) -> None:
        if "parts" in row:
            # Of other tasks than those of now nothing is known, and their leases are of the past.
            self._begun = row["parts"] == self._places.shape
            self._first, self._drawn, self._begun_with = row["first_lease"], [], row.get("priors")
            self.rates.reset((task, TaskCounts(*counts)) for task, *counts in row["known"])
        elif "drawn" in row:
            self._drawn[max(0, row["first_lease"] - self._first) :] = row["drawn"]
        else:
            self.rates.note(row["task"], passed=row["passed"], failed=row["failed"], at=row["at"])

    def _begin(self, next_lease: int, *, at: int) -> None:
        priors, known = self._priors, list[tuple[int, TaskCounts]]()
        if priors is not None:
            known = priors.known(places=self._places.count, task_at=self._places.task_at, at=at)
        begun_with = None if priors is None else priors.fingerprint
        self._write(self._beginning(next_lease, known=known, at=at, begun_with=begun_with))

    def _beginning(
        self, first_lease: int, *, known: Sequence[tuple[int, TaskCounts]], at: int, begun_with: str | None
    ) -> dict[str, Any]:
        """A row with which all before it need not be read."""
        told = [[task, counts.passed, counts.failed, counts.at] for task, counts in known]
        priors = {} if begun_with is None else {"priors": begun_with}
        return {"first_lease": first_lease, "parts": self._places.shape, "known": told, "at": at, **priors}

    def _look_at_prompt(self, group: TrajectoryGroup) -> None:
        """Says once that the file's tasks are others than those of training, as held-out ones are."""
        told = self._prompts.get(group.task_index, group.prompt_text)
        if told != group.prompt_text and self._priors is not None:
            logger.warning(
                "rollouts.tasks.priors: training task %d has another prompt than task %d of %s: if that is of other "
                "tasks, as of held-out ones, its pass rates say nothing of these; evaluate the training tasks",
                group.task_index, group.task_index, self._priors.path,
            )  # fmt: skip
            self._prompts = {}

    def _forget_moved(self, next_lease: int) -> None:
        """Leases that were drawn ahead, and not granted before the level changed, are drawn again."""
        for lease_id in range(max(next_lease, self._first), self._end):
            drawn = self._drawn[lease_id - self._first]
            if self._places.part_of(drawn) != self._places.part_of(self._plain(lease_id)):
                del self._drawn[lease_id - self._first :]
                return

    def _pass_over(self, next_lease: int, *, at: int) -> None:
        """Leases that were granted while tasks were not drawn keep those of the plain order."""
        granted = [self._plain(lease_id) for lease_id in range(self._end, next_lease)]
        self._write({"first_lease": self._end, "drawn": granted, "at": at})

    def _draw(self, count: int, *, at: int) -> None:
        found = [self._task_and_variance(lease_id, at=at) for lease_id in range(self._end, self._end + count)]
        self._write({"first_lease": self._end, "drawn": [task for task, _ in found], "at": at})
        self._window += found
        counts = Counter(task for task, _ in self._window)
        self.newest = DrawnTasks(
            effective=len(self._window) ** 2 / sum(count**2 for count in counts.values()),
            variance=sum(variance for _, variance in self._window) / len(self._window),
        )

    def _task_and_variance(self, lease_id: int, *, at: int) -> tuple[int, float]:
        chance, rules = np.random.default_rng((self._rules.seed, lease_id, _STREAM)), self._rules
        place = self._plain(lease_id)
        first, tasks = self._places.part_of(place)
        candidates = [self._places.task_at(place)]
        if chance.random() >= rules.floor:
            candidates = (first + chance.integers(tasks, size=rules.candidates)).tolist()
        alpha, beta = self.rates.shapes(candidates, at=at)
        rates = chance.beta(alpha, beta)
        best = int(np.argmax(rates * (1.0 - rates)))
        return candidates[best], float(expected_variance(alpha, beta)[best])

    def _shorten_if_grown(self, next_lease: int, *, at: int) -> None:
        if self._rows is None or self._rows.size() <= self._rewrite_above:
            return
        try:
            self._shorten(self._rows, next_lease, at=at)
            self._unshortened.is_over()
        except OSError as error:
            self._unshortened.goes_on("%s grows while it cannot be written anew: %s", FILE, error)

    def _shorten(self, rows: RunRows, next_lease: int, *, at: int) -> None:
        """Writes the file anew without what no resume needs."""
        first = max(self._first, min(self._needed_from(), next_lease))
        begun = self._beginning(first, known=self.rates.known(at=at), at=at, begun_with=self._begun_with)
        drawn = {"first_lease": first, "drawn": self._drawn[first - self._first :], "at": at}
        rows.replace([begun, drawn])
        self._take_up(begun)
        self._take_up(drawn)
        self._rewrite_above = max(_SMALL_BYTES, 2 * rows.size())


MakeDraws = Callable[[TaskPlaces, Callable[[int], int]], TaskDraws]
"""From the places of the tasks, which the first env_service tells, and the plain order."""
