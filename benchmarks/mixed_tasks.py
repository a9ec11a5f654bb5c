"""A built-in environment whose tasks are of several difficulties: each has one of several options by lot.

A benchmark writes a copy of this file beside a run file, which names it as the import path of an environment.
"""

from collections.abc import Mapping
from inspect import isawaitable
from random import Random
from typing import Any, Literal

from pydantic import JsonValue

from env_service.builtin.arithmetic import ArithmeticEnvironment, ArithmeticOptions
from env_service.builtin.grid_games import MazeEnvironment, MazeOptions
from env_service.environments.interface import Action, Aggregation, Opening, Role, Step, Task
from env_service.environments.rules import Rules
from services.config.models import ConfigModel


class MixedOptions(ConfigModel):
    """Name of the environment, and options of each difficulty."""

    kind: Literal["maze", "arithmetic"]
    parts: tuple[dict[str, JsonValue], ...]


class MixedEnvironment:
    """The environment of a task's difficulty, which its seed draws."""

    roles: tuple[Role, ...] = ("user",)

    def __init__(self, options: MixedOptions) -> None:
        self._parts = [_environment(options.kind, part) for part in options.parts]
        self._playing: Any = self._parts[0]
        turns = max(part.rules.max_turns for part in self._parts)
        self.rules: Rules = self._parts[0].rules.model_copy(update={"max_turns": turns})
        self.metrics: Mapping[str, Aggregation] = self._parts[0].metrics

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises ValueError as the environment itself."""
        self._playing = Random(f"{task.seed}/difficulty").choice(self._parts)
        opening = self._playing.reset(task, seed)
        made: Opening = await opening if isawaitable(opening) else opening
        return made

    async def step(self, action: Action) -> Step:
        """Takes the step in the task's environment."""
        step = self._playing.step(action)
        made: Step = await step if isawaitable(step) else step
        return made


def _environment(kind: str, options: Mapping[str, JsonValue]) -> Any:
    if kind == "maze":
        return MazeEnvironment(MazeOptions.model_validate(options))
    return ArithmeticEnvironment(ArithmeticOptions.model_validate(options))
