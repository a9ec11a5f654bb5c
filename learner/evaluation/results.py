"""The results of an evaluation: every sample, and the numbers made of them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from learner.evaluation.estimators import consensus_at_k, pass_at_k, wilson_interval


@dataclass(frozen=True)
class Sample:
    """One completion of a held-out task, its reward, its answer as text (None if it gives none), its sampled tokens."""

    completion: str
    reward: float
    answer: str | None
    length: int
    truncated: bool


@dataclass(frozen=True)
class TaskSamples:
    """The scored samples of one held-out task, at least one, and who judged them."""

    task_index: int
    prompt: str
    samples: tuple[Sample, ...]
    verifier: str = ""


@dataclass(frozen=True)
class EvaluationResult:
    """The numbers of an evaluation on `tasks` tasks; `failed` ones came to nothing and are in no number.

    A sample is right if its reward reached the configured success. `accuracy` is the mean over tasks of the share of
    right samples, with its 95 % interval from `accuracy_low` to `accuracy_high` (Wilson, tasks as units); `reward` the
    mean over tasks of the mean reward. `pass_at_k` and `cons_at_k` are means over the tasks with at least k samples, by
    k. `samples`, `length_mean` in tokens and `truncated_share` are over all samples. The oldest and newest policy
    version that sampled a token are those of the whole evaluation; they differ when weights changed in the middle.
    `accuracy_by_verifier` is over the tasks of each verifier.
    """

    version: int
    tasks: int
    failed: int
    accuracy: float
    reward: float
    oldest_version: int
    newest_version: int
    truncated_share: float
    accuracy_low: float = 0.0
    accuracy_high: float = 1.0
    samples: int = 0
    length_mean: float = 0.0
    pass_at_k: dict[int, float] = field(default_factory=dict)
    cons_at_k: dict[int, float] = field(default_factory=dict)
    accuracy_by_verifier: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's numbers, and the samples by task in the order of indices. `environment` is the tasks'.

    `own`: the numbers of those tasks alone whose every token the version that was to be evaluated has sampled. Beside
    training there may be few: generators move on, and what is sampled after that tells nothing of this version.
    """

    environment: str
    result: EvaluationResult
    tasks: tuple[TaskSamples, ...]
    own: EvaluationResult | None = None


def result_of(
    tasks: Sequence[TaskSamples],
    *,
    version: int,
    failed: int,
    sampled_by: tuple[int, int],
    success: float,
    ks: Sequence[int],
) -> EvaluationResult:
    """The numbers. `sampled_by` is the oldest and the newest version that sampled; `success` the least right reward."""
    right = [[sample.reward >= success for sample in task.samples] for task in tasks]
    accuracy = _mean([sum(flags) / len(flags) for flags in right])
    low, high = wilson_interval(share=accuracy, count=len(tasks))
    samples = [sample for task in tasks for sample in task.samples]
    return EvaluationResult(
        version=version,
        tasks=len(tasks),
        failed=failed,
        accuracy=accuracy,
        reward=_mean([statistics.fmean(sample.reward for sample in task.samples) for task in tasks]),
        oldest_version=sampled_by[0],
        newest_version=sampled_by[1],
        truncated_share=_mean([float(sample.truncated) for sample in samples]),
        accuracy_low=low,
        accuracy_high=high,
        samples=len(samples),
        length_mean=_mean([float(sample.length) for sample in samples]),
        pass_at_k=_by_k(right, ks, lambda task, k: pass_at_k(samples=len(right[task]), correct=sum(right[task]), k=k)),
        cons_at_k=_by_k(right, ks, lambda task, k: consensus_at_k(_answers(tasks[task]), right[task], k=k)),
        accuracy_by_verifier=_by_verifier(tasks, right),
    )


def _by_verifier(tasks: Sequence[TaskSamples], right: Sequence[Sequence[bool]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for task, flags in zip(tasks, right, strict=True):
        if task.verifier:
            found.setdefault(task.verifier, []).append(sum(flags) / len(flags))
    return {verifier: _mean(shares) for verifier, shares in sorted(found.items())}


def _by_k(right: Sequence[Sequence[bool]], ks: Sequence[int], value: Callable[[int, int], float]) -> dict[int, float]:
    """The mean of `value(task, k)` over the tasks that have k samples, for each k that some task has."""
    fit = {k: [task for task, flags in enumerate(right) if len(flags) >= k] for k in ks}
    return {k: _mean([value(task, k) for task in found]) for k, found in fit.items() if found}


def _answers(task: TaskSamples) -> list[str | None]:
    return [sample.answer for sample in task.samples]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
