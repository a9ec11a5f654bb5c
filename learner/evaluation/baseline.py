"""The completions that a judge compares ours with: an earlier evaluation's, or those of a file of one's own."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from learner.evaluation.report import EvaluationReport, NotComparable, read_report
from learner.evaluation.results import TaskSamples

# So many tasks show how prompts of a file stand in prompts as the model reads them.
_SHOWING_TASKS = 64


@dataclass(frozen=True)
class Opponent:
    """What one of our tasks is compared with: the prompt as the judge is to read it, and at least one completion."""

    prompt: str
    completions: tuple[str, ...]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    prompt: str
    completion: str


Answers = Mapping[str, Sequence[str]]
"""Completions by prompt."""


def is_answers_file(path: Path) -> bool:
    """Whether it is a JSONL file of one's own, and not an evaluation."""
    return path.suffix == ".jsonl"


def read_answers(path: Path) -> Answers:
    """A file of lines {"prompt": ..., "completion": ...}; a prompt may have several. Raises NotComparable."""
    answers: dict[str, list[str]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for line in _lines(file, path):
                answers.setdefault(line.prompt, []).append(line.completion)
    except (OSError, UnicodeDecodeError) as error:
        raise NotComparable(f"evaluation.against cannot be read: {error}") from error
    if not answers:
        raise NotComparable(f'evaluation.against: {path} is empty; expected lines {{"prompt": ..., "completion": ...}}')
    return answers


def _lines(file: Collection[str] | Iterator[str], path: Path) -> Iterator[_Line]:
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            yield _Line.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise NotComparable(
                f"evaluation.against: {path}, line {number}: {where and where + ': '}{first['msg']}; expected "
                '{"prompt": text, "completion": text}'
            ) from error


def opponents_of(tasks: Sequence[TaskSamples], against: Answers | EvaluationReport) -> Mapping[int, Opponent]:
    """By the index of each of our tasks that `against` has, too. The environments must be the same."""
    if isinstance(against, EvaluationReport):
        theirs = {task.task_index: tuple(sample.completion for sample in task.samples) for task in against.tasks}
        return {
            task.task_index: Opponent(task.prompt, theirs[task.task_index])
            for task in tasks
            if theirs.get(task.task_index)
        }
    before, after = surroundings(tasks, against)
    found = {}
    for task in tasks:
        if not (task.prompt.startswith(before) and task.prompt.endswith(after)):
            continue
        prompt = task.prompt[len(before) : len(task.prompt) - len(after)]
        if prompt in against:
            found[task.task_index] = Opponent(prompt, tuple(against[prompt]))
    return found


def surroundings(tasks: Sequence[TaskSamples], prompts: Collection[str]) -> tuple[str, str]:
    """What the chat template puts before and after a prompt: the pair with which most tasks have one of `prompts`.

    A task's text is a prompt as the model reads it; a file of one's own has the prompt alone.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for task in tasks[:_SHOWING_TASKS]:
        seen.update(
            {
                (task.prompt[:at], task.prompt[at + len(prompt) :])
                for prompt in prompts
                if (at := task.prompt.find(prompt)) >= 0
            }
        )
    return max(seen, key=lambda pair: (seen[pair], -len(pair[0]) - len(pair[1])), default=("", ""))


def read_against(path: Path) -> Answers | EvaluationReport:
    """An earlier evaluation, or a file of one's own by its name's end. Raises NotComparable."""
    return read_answers(path) if is_answers_file(path) else read_report(path)
