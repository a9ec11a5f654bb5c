"""Tasks from JSONL files: one object per line, read and checked when the process starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from env_service.environments.interface import ChatMessage, Prompt, Role, Task, Verification
from env_service.environments.task_configs import JsonlTasks
from protocol.trajectories import Purpose
from services.config.options import complaint_of


class TaskFileError(ValueError):
    """A task file cannot be used; the text names file and line, and what is expected there."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Role
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    messages: tuple[_Message, ...] | None = Field(default=None, min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    verifier: str | None = Field(default=None, min_length=1)
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    answer: JsonValue = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("expected either messages or prompt, got " + ("both" if self.prompt else "neither"))
        return self


class JsonlTaskSource:
    """The tasks of one or two files. Raises TaskFileError for a line that is not a task."""

    def __init__(self, config: JsonlTasks) -> None:
        self._config = config
        self._lines: dict[Purpose, list[int]] = {"train": [], "evaluate": []}
        self._train = self._read(config.train_file, "train")
        self._evaluation = self._read(config.evaluation_file, "evaluate") if config.evaluation_file else []

    @property
    def train_tasks(self) -> int:
        return len(self._train)

    @property
    def evaluation_tasks(self) -> int:
        return len(self._evaluation)

    def task(self, purpose: Purpose, index: int) -> Task:
        """Raises IndexError beyond the number of tasks."""
        return (self._train if purpose == "train" else self._evaluation)[index]

    def where(self, purpose: Purpose, index: int) -> str:
        """File and line of a task, for messages."""
        path = self._config.train_file if purpose == "train" else self._config.evaluation_file
        return f"{path}:{self._lines[purpose][index]}"

    def _read(self, path: Path, purpose: Purpose) -> list[Task]:
        tasks = []
        for number, text in _lines(path):
            tasks.append(self._parse(text, where=f"{path}:{number}"))
            self._lines[purpose].append(number)
        if not tasks:
            raise TaskFileError(f"{path} holds no task: expected one JSON object per line, {_EXAMPLE}")
        return tasks

    def _parse(self, text: str, *, where: str) -> Task:
        try:
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            raise TaskFileError(f"{where}: {_complaint(error)}") from error
        return Task(prompt=self._prompt(line), verification=self._verification(line, where=where))

    def _prompt(self, line: _Line) -> Prompt:
        if line.messages is not None:
            messages = tuple(ChatMessage(message.role, message.content) for message in line.messages)
            return messages if messages[0].role == "system" else (*self._system(), *messages)
        assert line.prompt is not None
        return (*self._system(), ChatMessage("user", line.prompt)) if self._config.chat else line.prompt

    def _system(self) -> tuple[ChatMessage, ...]:
        return (ChatMessage("system", self._config.system_prompt),) if self._config.system_prompt else ()

    def _verification(self, line: _Line, *, where: str) -> Verification:
        verifier = line.verifier or self._config.verifier
        if verifier is None:
            raise TaskFileError(
                f"{where}: names no verifier and environment {self._config.name} has no default one; "
                "add verifier to the line, or set verifier for the environment"
            )
        answer = {} if line.answer is None else {"answer": line.answer}
        return Verification(verifier, {**answer, **line.arguments})


_EXAMPLE = 'such as {"prompt": "27+82=", "verifier": "exact_match", "arguments": {"answer": "109"}}'


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        why = first["msg"].removeprefix("Invalid JSON: ").partition(" at line ")[0]
        return f"is no JSON object ({why}): expected one a line, {_EXAMPLE}"
    return complaint_of(error, _Line)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, text) for number, text in enumerate(file, start=1) if text.strip())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise TaskFileError(
            f"cannot read {path}: {why}; expected a file with one JSON object per line, {_EXAMPLE}"
        ) from error
