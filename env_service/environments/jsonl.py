"""Tasks of one turn: those of JSONL files, one object per line, read and checked when the process starts; and two-digit
addition, the smallest task on which learning shows.
"""

from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from env_service.environments.interface import USER_LAST, Action, ChatMessage, Prompt, Role, Step, Task, Verification
from env_service.environments.task_configs import JsonlTasks
from env_service.environments.task_files import TaskFileError, TaskLists, read_tasks
from protocol.trajectories import Purpose
from services.config.options import complaint_of

_EXAMPLE = ', such as {"prompt": "27+82=", "verifier": "exact_match", "arguments": {"answer": "109"}}'
_PAIRS = 10_000
_EVALUATION = 2_000
_SPLIT_SEED = 20_250_101  # part of the task's definition: with another one, old models have seen the evaluation tasks


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
    privileged: str = ""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("expected either messages or prompt, got " + ("both" if self.prompt else "neither"))
        if self.messages and self.messages[-1].role == "assistant":
            raise ValueError(f"the last of the messages is of the assistant: {USER_LAST}")
        return self


class JsonlTaskSource(TaskLists):
    """The tasks of one or two files. Raises TaskFileError for a line that is not a task."""

    def __init__(self, config: JsonlTasks) -> None:
        self._config = config
        self._lines: dict[Purpose, list[int]] = {"train": [], "evaluate": []}
        super().__init__(
            self._read(config.train_file, "train"),
            self._read(config.evaluation_file, "evaluate") if config.evaluation_file else [],
        )

    def where(self, purpose: Purpose, index: int) -> str:
        """File and line of a task, for messages."""
        path = self._config.train_file if purpose == "train" else self._config.evaluation_file
        return f"{path}:{self._lines[purpose][index]}"

    def _read(self, path: Path, purpose: Purpose) -> list[Task]:
        def make(number: int, text: str) -> Task:
            self._lines[purpose].append(number)
            return self._parse(text, where=f"{path}:{number}")

        return read_tasks(path, make, example=_EXAMPLE)

    def _parse(self, text: str, *, where: str) -> Task:
        try:
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            raise TaskFileError(f"{where}: {_complaint(error)}") from error
        verification = self._verification(line, where=where)
        return Task(prompt=self._prompt(line), verification=verification, privileged=line.privileged)

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


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid" and str(error.errors()[0]["input"]).lstrip().startswith("["):
        return f"begins a list: expected one JSON object a line and nothing around them{_EXAMPLE}"
    if first["type"] == "json_invalid":
        why = first["msg"].removeprefix("Invalid JSON: ").partition(" at line ")[0]
        return f"is no JSON object ({why}): expected one a line{_EXAMPLE}"
    said = complaint_of(error, _Line)
    return f"{said}; a conversation is a list called messages" if first["loc"] == ("prompt",) else said


def split() -> tuple[list[int], list[int]]:
    """The pairs `100 a + b` of the training and of the evaluation tasks, 8,000 and 2,000, the same at every call."""
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(_PAIRS).tolist()
    return order[_EVALUATION:], order[:_EVALUATION]


class Addition(TaskLists):
    """`37+48=` is to be continued with `085`; every pair of numbers from 00 to 99 is one task."""

    def __init__(self) -> None:
        train, evaluation = split()
        super().__init__([_sum(pair) for pair in train], [_sum(pair) for pair in evaluation])


def _sum(pair: int) -> Task:
    left, right = divmod(pair, 100)
    answer = Verification("exact_match", {"answer": f"{left + right:03d}"})
    return Task(prompt=f"{left:02d}+{right:02d}=", verification=answer)


class SingleTurn:
    """Opens with the task's prompt and ends with the first completion, which the task's verifier judges."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def reset(self, task: Task, seed: int) -> Prompt:
        """The task's prompt; the seed changes nothing."""
        self._task = task
        return task.prompt

    def step(self, action: Action) -> Step:
        """The end, whatever the action was."""
        assert self._task is not None, "step before reset"
        return Step(verification=self._task.verification)
