"""Draws of tasks by what they teach, against the plain order, with a scripted policy in place of a model.

    .venv/bin/python -m benchmarks.task_draws [--steps N] [--seeds N]

The policy is a formula, not a language model: it solves task i with probability σ(θ + u − b), where b is the task's
difficulty, θ a skill that all tasks share, and u what it has learned of this task alone. A group of rollouts moves both
along the gradient of a group baseline divided by the deviation, so one without spread moves nothing. The draws are the
learner's own code. So this tells what the choice of tasks can do where skill carries over from task to task as the
formula says, and nothing of what a model learns. Accuracy is that of θ alone on other tasks of the same difficulties.
With priors every task was tried some times before the run by the policy as it then was; these trials are in no number.
Results go to benchmarks/results/task_draws.md.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from learner.leases.task_draws import DrawRules, TaskDraws, TaskPlaces
from learner.leases.task_order import TaskOrder
from learner.leases.task_priors import TaskPriors

RESULT = Path(__file__).with_name("results") / "task_draws.md"
_GROUPS, _ROLLOUTS = 32, 8
_SHARED_RATE, _OWN_RATE = 0.1, 0.5
_TRIALS, _PRIOR_WEIGHT = 4, 4.0
_MANY = 10_000
"""Tasks: of so many nobody has tried each before."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """Tasks whose difficulties are normal around `mean`; `hopeless` is the share of those that nobody ever solves.

    `target` is the accuracy on other tasks of the kind that a run is to reach.
    """

    name: str
    tasks: int
    mean: float
    deviation: float
    target: float
    hopeless: float = 0.0

    def difficulties(self, count: int, *, seed: int) -> FloatArray:
        """Of so many tasks, of shape (tasks,)."""
        chance = np.random.default_rng((seed, count))
        found = chance.normal(self.mean, self.deviation, size=count)
        found[chance.random(count) < self.hopeless] = 50.0
        return found


POPULATIONS = (
    Population("alike", 1000, mean=1.0, deviation=1.0, target=0.6),
    Population("from easy to hard", 1000, mean=2.0, deviation=5.0, target=0.5),
    Population("mostly hopeless", 1000, mean=2.0, deviation=2.0, target=0.07, hopeless=0.8),
    Population("from easy to hard, each met once at most", 100_000, mean=2.0, deviation=5.0, target=0.5),
)


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run: the share of its groups with spread, its groups until the target (None if it never got there),
    its accuracy at the end, and the effective number of the tasks of its last 1,024 leases.
    """

    spread: float
    groups: int | None
    accuracy: float
    effective: float


class ScriptedPolicy:
    """The policy of the docstring above."""

    def __init__(self, difficulties: FloatArray) -> None:
        self._difficulties = difficulties
        self._own = np.zeros(len(difficulties))
        self.skill = 0.0

    def pass_rate(self, task: int) -> float:
        """Of one rollout."""
        return float(solved(self.skill + self._own[task] - self._difficulties[task]))

    def train(self, groups: Sequence[tuple[int, FloatArray]]) -> None:
        """Makes an update on groups of a task and its rewards, 0 or 1."""
        for task, rewards in groups:
            gradient = gradient_of(rewards)
            self.skill += _SHARED_RATE * gradient / len(groups)
            self._own[task] += _OWN_RATE * gradient


def solved(logit: FloatArray) -> FloatArray:
    """σ of each."""
    return 1.0 / (1.0 + np.exp(-logit))


def gradient_of(rewards: FloatArray) -> float:
    """Mean of A (r − p) over a group, A = (r − mean) / deviation: √(m (1 − m)) for a mean of m, 0 without spread."""
    mean = float(np.mean(rewards))
    return float(np.sqrt(mean * (1.0 - mean)))


class _Draws(TaskDraws):
    """The learner's draws, told of rewards without a group's tokens."""

    def tell(self, task: int, rewards: FloatArray, *, at: int) -> None:
        passed = int(np.sum(rewards))
        self.rates.note(task, passed=passed, failed=len(rewards) - passed, at=at)


def priors(policy: ScriptedPolicy, *, tasks: int, trials: int, seed: int) -> TaskPriors:
    """Passes of each task in so many trials by this policy."""
    chance = np.random.default_rng((seed, trials))
    rates = [policy.pass_rate(task) for task in range(tasks)]
    tried = {task: (float(chance.binomial(trials, rate)), float(trials)) for task, rate in enumerate(rates)}
    return TaskPriors(path=Path("tried.jsonl"), tried=tried, weight=_PRIOR_WEIGHT, fingerprint="")


def run(population: Population, *, drawn: bool, steps: int, seed: int, trials: int = 0) -> RunOutcome:
    """Trains the scripted policy for so many steps, after so many trials of each task."""
    chance, order = np.random.default_rng(seed), TaskOrder(count=population.tasks, seed=seed)
    policy = ScriptedPolicy(population.difficulties(population.tasks, seed=seed))
    others = population.difficulties(2000, seed=seed + 1000)
    draws = _Draws(
        places=TaskPlaces(count=population.tasks),
        rules=DrawRules(seed=seed, ahead=_GROUPS) if drawn else DrawRules(seed=seed, ahead=_GROUPS, floor=1.0),
        plain=order.task_index,
        priors=priors(policy, tasks=population.tasks, trials=trials, seed=seed) if trials else None,
    )
    spread, groups, accuracy = [], None, 0.0
    for step in range(steps):
        first = step * _GROUPS
        draws.cover(next_lease=first, end=first + _GROUPS, at=step)
        tasks = [draws.task_of(lease_id) for lease_id in range(first, first + _GROUPS)]
        batch = [(task, (chance.random(_ROLLOUTS) < policy.pass_rate(task)).astype(float)) for task in tasks]
        spread += [gradient_of(rewards) > 0 for _, rewards in batch]
        policy.train(batch)
        for task, rewards in batch:
            draws.tell(task, rewards, at=step)
        accuracy = float(np.mean(solved(policy.skill - others)))
        groups = first + _GROUPS if groups is None and accuracy >= population.target else groups
    assert draws.newest is not None
    return RunOutcome(spread=float(np.mean(spread)), groups=groups, accuracy=accuracy, effective=draws.newest.effective)


def main() -> None:
    """Runs all populations, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for population in POPULATIONS:
        ways = [("order", False, 0), ("signal", True, 0)]
        if population.tasks < _MANY:
            ways.append((f"signal, priors of {_TRIALS} trials", True, _TRIALS))
        for way, drawn, trials in ways:
            found = [
                run(population, drawn=drawn, steps=arguments.steps, seed=seed, trials=trials)
                for seed in range(arguments.seeds)
            ]
            rows.append(_row(population, found, way=way))
    report = _report(rows, steps=arguments.steps, seeds=arguments.seeds)
    print(report)
    RESULT.write_text(report, encoding="utf-8")


def _row(population: Population, found: Sequence[RunOutcome], *, way: str) -> str:
    reached = sorted(each.groups for each in found if each.groups is not None)
    until = f"{statistics.median(reached):.0f} ({reached[0]} to {reached[-1]})" if reached else "never"
    until += f", {len(reached)} of {len(found)} runs" if 0 < len(reached) < len(found) else ""
    spread, accuracy, effective = (
        statistics.mean(getattr(each, name) for each in found) for name in ("spread", "accuracy", "effective")
    )
    name = f"{population.name}, {population.tasks:,} tasks"
    return f"| {name} | {way} | {spread:.3f} | {population.target} | {until} | {accuracy:.3f} | {effective:.0f} |"


def _report(rows: Sequence[str], *, steps: int, seeds: int) -> str:
    return "\n".join(
        (
            "# Tasks by what they teach: a scripted policy",
            "",
            f"`python -m benchmarks.task_draws --steps {steps} --seeds {seeds}`. **The policy is a formula, not a "
            "model**: see the script. The draws",
            'are the learner\'s own: `[learner.rollouts.tasks] by = "signal"` at its defaults against `by = "order"`, '
            f"{_GROUPS} groups of {_ROLLOUTS}",
            f"rollouts a step, {steps} steps, {seeds} seeds. Means over the seeds; of the groups until the target the "
            "median, the least and the most.",
            f"Priors: each task was tried {_TRIALS} times before the run, which is in no number: of 1,000 tasks "
            f"{_TRIALS * 1000 // _ROLLOUTS} groups' worth. They count as {_PRIOR_WEIGHT:g} rollouts.",
            "",
            "| tasks | by | groups with spread | target accuracy | groups until it | accuracy at the end | "
            "effective tasks of 1,024 leases |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )


if __name__ == "__main__":
    main()
