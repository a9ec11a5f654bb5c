"""The results of an evaluation: every sample, the numbers made of them, its file, its table, and comparisons.

The numbers are pure functions of rewards and answers. Tasks are the independent units throughout: the samples of one
task are alike, so intervals count tasks, and are too wide rather than too narrow. For votes, answers are compared as
text: 1/2 and 0.5 are two. An evaluation that stands by itself has a file and a table, and is compared with an earlier
one.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from learner.journal.files import write_atomically
from services.thinking import without_thought

_NORMAL_95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile: intervals cover 95 %."""
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = "\\boxed{"
_FOUND = ("extracted", "parsed")
"""Reward components by which a verifier says whether it found an answer at all."""


def pass_at_k(*, samples: int, correct: int, k: int) -> float:
    """The chance that at least one of `k` samples is right, of a task of whose `samples` so many are `correct`.

    The unbiased estimate 1 − C(n−c, k)/C(n, k) of arXiv 2107.03374, as a product without large numbers. Needs
    1 ≤ k ≤ samples.
    """
    assert 0 <= correct <= samples, (correct, samples)
    assert 1 <= k <= samples, (k, samples)
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / drawn for drawn in range(samples - correct + 1, samples + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """The chance that the commonest answer is right (arXiv 2203.11171); equally common ones win with equal chance.

    None does not vote; without any vote it is 0. Where samples of one answer were judged differently, because the
    verifier reads more than the answer, the answer counts as right by the share of them that were.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    right = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if is_right)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(right[answer] / most for answer in winners) / len(winners)


def consensus_at_k(answers: Sequence[str | None], correct: Sequence[bool], *, k: int) -> float:
    """`majority` of `k` samples: the mean over the disjoint runs of k samples in order, which is unbiased.

    What is left over at the end is not used. Needs 1 ≤ k ≤ len(answers).
    """
    assert 1 <= k <= len(answers), (k, len(answers))
    starts = range(0, len(answers) - k + 1, k)
    return math.fsum(majority(answers[at : at + k], correct[at : at + k]) for at in starts) / len(starts)


def wilson_interval(*, share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share seen in `count` independent units (Wilson 1927); 0 to 1 for none."""
    assert 0 <= share <= 1, share
    if count == 0:
        return 0.0, 1.0
    spread = _NORMAL_95**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def win_rate(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Share of pairs in which our sample has the higher reward than theirs for the same task; ties count half.

    The mean over tasks of the mean over all pairs of their samples. Each sample was scored by itself, by the same
    scorer, so there is no order of a pair that could matter. Needs at least one task, with samples on both sides.
    """
    assert ours, "a win rate is over at least one task"
    shares = [_share_won(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    return math.fsum(shares) / len(shares)


def _share_won(mine: Sequence[float], other: Sequence[float]) -> float:
    points = math.fsum(float(a > b) + 0.5 * float(a == b) for a in mine for b in other)
    return points / (len(mine) * len(other))


def answer_of(completion: str, *, components: Mapping[str, float]) -> str | None:
    r"""The answer in a completion, None if there is none or the verifier, by its `components`, found none.

    The thought before the last `</think>` does not count. The answer is the last `<answer>..</answer>`, else the whole
    text; within it the last `\boxed{..}`, if there is one; with each white space made one space.
    """
    if any(components.get(name) == 0 for name in _FOUND):
        return None
    text = without_thought(completion)
    tagged = _TAG.findall(text)
    given = str(tagged[-1]) if tagged else text
    return " ".join((_last_boxed(given) or given).split()) or None


def _last_boxed(text: str) -> str | None:
    """The content of the last box, None if it never closes."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


@dataclass(frozen=True)
class Sample:
    """A completion of a held-out task, its reward, its answer as text (None if it gives none), its sampled tokens."""

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


class NotComparable(ValueError):
    """An earlier evaluation cannot be compared with; the text says what it is, what was expected and what helps."""


@dataclass(frozen=True)
class Comparison:
    """Share of samples of ours with the higher reward, ties half, on the `tasks` tasks that both evaluations have.

    The interval of 95 % from `low` to `high` has tasks as units. The judge is the tasks' verifier, which scored each
    completion by itself: a gold scorer, or a reward model behind the reward service.
    """

    against: Path
    tasks: int
    win_rate: float
    low: float
    high: float


@dataclass(frozen=True)
class JudgedComparison:
    """Share of completions of ours that a pairwise verifier preferred to those of `against`.

    `win_rate` counts ties half; `tie_rate` is the share of pairs that were tied. Both are means over `tasks` of means
    over their pairs, with 95 % intervals whose units are tasks. `failed` pairs got no verdict and are in no number.
    `versions` are those of the verifier.
    """

    against: Path
    verifier: str
    versions: tuple[str, ...]
    tasks: int
    pairs: int
    failed: int
    win_rate: float
    low: float
    high: float
    tie_rate: float
    tie_low: float
    tie_high: float


class EvaluationReport(BaseModel):
    """The content of `evaluation.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    checkpoint: Path | None
    environment: str
    temperature: float
    success_reward: float
    result: EvaluationResult
    comparison: Comparison | None
    judged: JudgedComparison | None = None
    tasks: tuple[TaskSamples, ...]


def read_report(path: Path) -> EvaluationReport:
    """An evaluation written by `write_report`. Raises NotComparable."""
    try:
        return EvaluationReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise NotComparable(f"evaluation.against cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise NotComparable(
            f"evaluation.against: {path} is no evaluation of this release ({where}: {first['msg']}); expected a file "
            "written by headway eval; evaluate the other model once more"
        ) from error


def write_report(report: EvaluationReport, path: Path) -> None:
    """Writes the file, whole or not at all; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, report.model_dump_json(indent=2) + "\n")


def compare(ours: Evaluation, theirs: EvaluationReport, *, path: Path) -> Comparison:
    """Our evaluation against an earlier one, on their common tasks. Raises NotComparable."""
    if ours.environment != theirs.environment:
        raise NotComparable(
            f"evaluation.against: {path} is of environment {theirs.environment!r}, this evaluation of "
            f"{ours.environment!r}: compare evaluations of the same environment"
        )
    rewards, others = _rewards(ours.tasks), _rewards(theirs.tasks)
    common = sorted(rewards.keys() & others.keys())
    if not common:
        raise NotComparable(
            f"evaluation.against: {path} has no task in common with this evaluation: evaluate more tasks"
        )
    share = win_rate([rewards[task] for task in common], [others[task] for task in common])
    low, high = wilson_interval(share=share, count=len(common))
    return Comparison(against=path, tasks=len(common), win_rate=share, low=low, high=high)


def _rewards(tasks: tuple[TaskSamples, ...]) -> dict[int, list[float]]:
    return {task.task_index: [sample.reward for sample in task.samples] for task in tasks}


def table(report: EvaluationReport, *, path: Path) -> str:
    """The report as a person reads it."""
    result, versus = report.result, report.comparison
    interval = f"{result.accuracy:.1%} ({result.accuracy_low:.1%} to {result.accuracy_high:.1%})"
    rows = [
        ("evaluated", str(report.checkpoint or report.model)),
        ("accuracy", f"{interval} on {result.tasks} held-out tasks of {report.environment}"),
        ("pass@k", _shares_by_k(result.pass_at_k)),
        ("cons@k", _shares_by_k(result.cons_at_k)),
        ("reward", f"{result.reward:.3f}"),
        (
            "completions",
            f"{result.samples}, {result.length_mean:.1f} tokens each, {result.truncated_share:.1%} truncated",
        ),
    ]
    if versus is not None:
        interval = f"{versus.win_rate:.1%} ({versus.low:.1%} to {versus.high:.1%})"
        rows.append(("win rate", f"{interval} on {versus.tasks} tasks against {versus.against}"))
    if report.judged is not None:
        rows += _judged_rows(report.judged)
    if result.failed:
        rows.append(("given up", f"{result.failed} tasks, which are in no number above"))
    rows.append(("file", str(path)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _judged_rows(judged: JudgedComparison) -> list[tuple[str, str]]:
    failed = f", {judged.failed} more got no verdict" if judged.failed else ""
    won = f"{judged.win_rate:.1%} ({judged.low:.1%} to {judged.high:.1%})"
    tied = f"{judged.tie_rate:.1%} ({judged.tie_low:.1%} to {judged.tie_high:.1%})"
    return [
        ("preferred", f"{won} by {judged.verifier} on {judged.tasks} tasks against {judged.against}"),
        ("tied", f"{tied} of {judged.pairs} pairs{failed}"),
    ]


def _shares_by_k(shares: dict[int, float]) -> str:
    return "  ".join(f"{k}: {share:.1%}" for k, share in shares.items())
