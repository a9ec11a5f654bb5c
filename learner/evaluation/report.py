"""The file and the table of an evaluation that stands by itself, and its comparison with an earlier one."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from learner.evaluation.results import Evaluation, EvaluationResult, TaskSamples, wilson_interval, win_rate
from learner.journal.files import write_atomically


class NotComparable(ValueError):
    """An earlier evaluation cannot be compared with; the text says what it is, what was expected and what helps."""


@dataclass(frozen=True)
class Comparison:
    """How often our samples had the higher reward, ties half, on the `tasks` tasks that both evaluations have.

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
    """How often our completion was preferred to one of `against`, as a pairwise verifier says of each pair.

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
    """What `evaluation.json` holds."""

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
        ("pass@k", _by_k(result.pass_at_k)),
        ("cons@k", _by_k(result.cons_at_k)),
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


def _by_k(shares: dict[int, float]) -> str:
    return "  ".join(f"{k}: {share:.1%}" for k, share in shares.items())
