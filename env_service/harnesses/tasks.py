"""Tasks of harnesses: those of the environments on a computer, as they are, or questions of a file.

Of an environment on a computer the opening, the computer and the judgement are used. The tools that it offers the
policy are not: a harness brings its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from env_service.builtin.computer import ComputerEnvironment, ComputerOptions
from env_service.builtin.computer_tools import TaskComputer
from env_service.builtin.task_sets import HarborEnvironment, HarborOptions, RepositoryEnvironment, RepositoryOptions
from env_service.environments.interface import Opening, Step, Task, TaskSource
from env_service.environments.task_files import tasks_of_files
from protocol.trajectories import Purpose
from services.config.models import ConfigModel

_TOOLS = ("tools", "result_role", "result_characters")


class QuestionOptions(ConfigModel):
    """Questions that a verifier judges the answers to."""

    train_file: Path = Field(description="JSONL file: `prompt`, and `answer` or `arguments` for the verifier")
    evaluation_file: Path | None = Field(None, description="the same for evaluation, if there is any")
    verifier: str = Field(min_length=1, max_length=256, description="who judges the harness's answer")
    system_prompt: str = Field("", description="instructions beside the question; empty for none")


class HarnessTasks(ConfigModel):
    """Tasks that a harness gets: exactly one of the four is set."""

    computer: ComputerOptions | None = Field(None, description="tasks of the environment `computer`")
    harbor: HarborOptions | None = Field(None, description="tasks of the environment `harbor`")
    repositories: RepositoryOptions | None = Field(None, description="tasks of the environment `repositories`")
    questions: QuestionOptions | None = Field(None, description="questions, without a computer")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        found = [name for name in HarnessTasks.model_fields if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(
                f"expected one of {', '.join(HarnessTasks.model_fields)}, the tasks of the harness, got "
                f"{' and '.join(found) or 'none'}"
            )
        given: BaseModel = getattr(self, found[0])
        if unused := [name for name in _TOOLS if name in given.model_fields_set]:
            raise ValueError(f"{found[0]}: {unused[0]} is set, and the harness has tools of its own; leave it out")
        return self

    @property
    def system_prompt_is_set(self) -> bool:
        """True if the options say one."""
        kinds: list[BaseModel | None] = [self.computer, self.harbor, self.repositories, self.questions]
        return any(each is not None and "system_prompt" in each.model_fields_set for each in kinds)

    def source(self) -> TaskSource:
        """The tasks. Raises TaskFileError."""
        if self.computer is not None:
            return ComputerEnvironment.tasks(self.computer)
        if self.harbor is not None:
            return HarborEnvironment.tasks(self.harbor)
        if self.repositories is not None:
            return RepositoryEnvironment.tasks(self.repositories)
        assert self.questions is not None
        return tasks_of_files(self.questions.train_file, self.questions.evaluation_file, _question)

    def computer_work(self) -> "ComputerWork | None":
        """The work on a computer; None for questions. Raises ImageFault for an image that there is not."""
        if self.computer is not None:
            return ComputerEnvironment(self.computer)
        if self.harbor is not None:
            return HarborEnvironment(self.harbor)
        return None if self.repositories is None else RepositoryEnvironment(self.repositories)


class ComputerWork(Protocol):
    """An environment on a computer, without the policy's tools."""

    @property
    def computer(self) -> TaskComputer: ...

    async def reset(self, task: Task, seed: int) -> Opening: ...

    async def judged(self, step: Step) -> Step: ...

    async def close(self) -> None: ...


class _Question(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: str = Field(min_length=1)
    answer: JsonValue = None
    arguments: Mapping[str, JsonValue] = {}


def _question(number: int, text: str, purpose: Purpose) -> Task:
    asked = _Question.model_validate_json(text)
    return Task(seed=number, prompt=asked.prompt, data=asked.model_dump(mode="json"), purpose=purpose)
