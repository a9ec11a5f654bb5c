"""Tasks that are held in memory, and files of them with one JSON object per line, read when the process starts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from env_service.environments.interface import Task
from protocol.codec import describe
from protocol.trajectories import Purpose

OBJECT: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
"""Reads a line that may be any JSON object."""


class TaskFileError(ValueError):
    """A task file cannot be used; the text names file and line, and what is expected there."""


class TaskLists:
    """Tasks for training and for evaluation that are held."""

    def __init__(self, train: Sequence[Task], evaluation: Sequence[Task]) -> None:
        self._tasks: dict[Purpose, Sequence[Task]] = {"train": train, "evaluate": evaluation}

    @property
    def train_tasks(self) -> int:
        return len(self._tasks["train"])

    @property
    def evaluation_tasks(self) -> int:
        return len(self._tasks["evaluate"])

    def task(self, purpose: Purpose, index: int) -> Task:
        """Raises IndexError beyond the number of tasks."""
        return self._tasks[purpose][index]


def tasks_of_files(train: Path, evaluation: Path | None, make: Callable[[int, str, Purpose], Task]) -> TaskLists:
    """The tasks that are made of the lines of one or two files, by number and text. Raises TaskFileError."""
    return TaskLists(
        read_tasks(train, lambda number, text: make(number, text, "train")),
        read_tasks(evaluation, lambda number, text: make(number, text, "evaluate")) if evaluation else [],
    )


def read_tasks(path: Path, make: Callable[[int, str], Task], *, example: str = "") -> list[Task]:
    """The tasks that are made of a file's lines, blank ones left out, by number and text.

    Raises TaskFileError for a file without tasks, and for a line at which `make` raises ValidationError.
    """
    expected = f"expected one JSON object per line{example}"
    tasks = []
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors begin a file with a mark
            for number, text in enumerate(file, start=1):
                if text.strip():
                    tasks.append(make(number, text))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise TaskFileError(f"cannot read {path}: {why}; {expected}") from error
    except ValidationError as error:
        raise TaskFileError(f"{path}:{number}: {describe(error)}; {expected}") from error
    if not tasks:
        raise TaskFileError(f"{path} holds no task: {expected}")
    return tasks
