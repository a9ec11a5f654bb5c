"""Priors of the tasks: pass rates of a file, with which their posteriors begin before the first rollout.

    an evaluation by itself, or lines of one's own ─▶ passes and trials of each task ─▶ counts, of a bounded weight

A file tells the pass rates of some other policy, at some other time, however often it tried. So a task's trials count
as `weight` rollouts at most, and from there on as those that the learner saw at its first draw: they are forgotten as
these are. They are written into the run's folder with the first draw, and the file is not read for a resume.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from learner.evaluation.results import EvaluationReport
from learner.leases.pass_rates import TaskCounts
from services.process import WrongSettings

logger = logging.getLogger(__name__)

_EXAMPLE = '{"task": 0, "passes": 3, "trials": 8}'
_EXPECTED = f"expected evaluation.json of headway eval, or a file NAME.jsonl of lines {_EXAMPLE}"
_Number = Annotated[float, Field(allow_inf_nan=False)]


class PriorsFault(WrongSettings):
    """A file of priors that cannot be used; the text says where it is wrong, what was expected and what helps."""

    def __init__(self, text: str) -> None:
        super().__init__(f"rollouts.tasks.priors: {text}")


class _PriorLine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task: int = Field(ge=0)
    passes: _Number = Field(ge=0)
    trials: _Number = Field(gt=0)


@dataclass(frozen=True, kw_only=True)
class TaskPriors:
    """Passes and trials of training tasks, by index; those of a task count as `weight` rollouts at most.

    `fingerprint` is another if the file, the weight or what counts as a pass is. `prompts` are those of the tasks, if
    the file has them.
    """

    path: Path
    tried: Mapping[int, tuple[float, float]]
    weight: float
    fingerprint: str
    prompts: Mapping[int, str] = field(default_factory=dict)

    def known(self, *, places: int, task_at: Callable[[int], int], at: int) -> list[tuple[int, TaskCounts]]:
        """The counts with which the tasks begin at step `at`. Indices are those of `places`, of which `task_at` tells
        the task: what is told of several places of one task is added up. Those of no place are left out, and said.
        """
        unknown = [index for index in self.tried if index >= places]
        if unknown:
            logger.warning(
                "rollouts.tasks.priors: %d of the %d tasks in %s are left out, first %d: the environment's training "
                "tasks are 0 to %d",
                len(unknown), len(self.tried), self.path, unknown[0], places - 1,
            )  # fmt: skip
        together: dict[int, tuple[float, float]] = {}
        for index, (passes, trials) in self.tried.items():
            if index < places:
                former = together.get(task_at(index), (0.0, 0.0))
                together[task_at(index)] = former[0] + passes, former[1] + trials
        return [(task, self._counts(passes, trials, at=at)) for task, (passes, trials) in together.items()]

    def _counts(self, passes: float, trials: float, *, at: int) -> TaskCounts:
        share = min(1.0, self.weight / trials)
        return TaskCounts(passes * share, (trials - passes) * share, at)


def read_priors(path: Path, *, weight: float, success_reward: float, environment: str | None = None) -> TaskPriors:
    """Reads what `headway eval` wrote, or, by the end .jsonl of its name, lines of task, passes and trials.

    A sample of an evaluation is a pass with a reward of at least `success_reward`. `environment` is that of the
    training tasks, if it is set. Raises PriorsFault.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PriorsFault(
            f"{path} cannot be read ({error.strerror}): {_EXPECTED}. A run that has begun keeps its priors without it: "
            "leave the setting out"
        ) from error
    fingerprint = f"{hashlib.sha256(content).hexdigest()[:16]} {weight:g} {success_reward:g}"
    tried: dict[int, tuple[float, float]] = {}
    prompts: dict[int, str] = {}
    rows = (
        _of_lines(content, path) if path.suffix == ".jsonl" else _of_report(content, path, success_reward, environment)
    )
    for where, row, prompt in rows:
        if row.task in tried:
            raise PriorsFault(f"{path}, {where}: task {row.task} is there a second time; leave one of the two out")
        if row.passes > row.trials:
            raise PriorsFault(
                f"{path}, {where}: task {row.task} has {row.passes:g} passes in {row.trials:g} trials, a rate of more "
                "than 1; expected passes of at most trials"
            )
        tried[row.task] = row.passes, row.trials
        if prompt:
            prompts[row.task] = prompt
    if not tried:
        raise PriorsFault(f"{path} tells of no task: {_EXPECTED}")
    return TaskPriors(path=path, tried=tried, weight=weight, fingerprint=fingerprint, prompts=prompts)


def _of_lines(content: bytes, path: Path) -> Iterator[tuple[str, _PriorLine, str]]:
    for number, text in enumerate(content.splitlines(), 1):
        if text.strip():
            try:
                yield f"line {number}", _PriorLine.model_validate_json(text), ""
            except ValidationError as error:
                raise PriorsFault(f"{path}, line {number}: {_complaint(error)}; expected {_EXAMPLE}") from error


def _of_report(
    content: bytes, path: Path, success_reward: float, environment: str | None
) -> Iterator[tuple[str, _PriorLine, str]]:
    try:
        report = EvaluationReport.model_validate_json(content)
    except ValidationError as error:
        raise PriorsFault(
            f"{path} is no evaluation of this release ({_complaint(error)}): {_EXPECTED}; evaluate once more"
        ) from error
    if environment is not None and report.environment != environment:
        raise PriorsFault(
            f"{path} is of environment {report.environment!r}, and rollouts.environment is {environment!r}: evaluate "
            "that one, on its training tasks"
        )
    for number, task in enumerate(report.tasks):
        passes = sum(sample.reward >= success_reward for sample in task.samples)
        if task.samples:
            row = _PriorLine(task=task.task_index, passes=float(passes), trials=float(len(task.samples)))
            yield f"tasks.{number}", row, task.prompt


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where and where + ': '}{first['msg']}"
