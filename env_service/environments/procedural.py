"""Tasks that reasoning-gym generates, each from a seed of its own."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Protocol

import reasoning_gym
from pydantic import JsonValue
from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

from env_service.environments.interface import ChatMessage, Prompt, Task, Verification
from env_service.environments.task_configs import ReasoningGymTasks
from protocol.trajectories import Purpose
from services.config.options import nearest


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, object]: ...


class UnknownDataset(ValueError):
    """The configured dataset cannot be made; the text names it and its settings."""


class ReasoningGymSource:
    """Questions of a reasoning-gym dataset, judged by its own scorer in the reward service.

    Task i comes from seed + i; evaluation tasks follow the training tasks, so that no seed is in both.
    """

    def __init__(self, config: ReasoningGymTasks) -> None:
        self._config = config
        self._dataset = _create(config)

    @property
    def train_tasks(self) -> int:
        return self._config.train_tasks

    @property
    def evaluation_tasks(self) -> int:
        return self._config.evaluation_tasks

    async def task(self, purpose: Purpose, index: int) -> Task:
        """Generated in a thread: some datasets search for a long time."""
        offset = 0 if purpose == "train" else self._config.train_tasks
        return await asyncio.to_thread(self._make, offset + index)

    def _make(self, index: int) -> Task:
        item = self._dataset[index]
        # Through JSON, so that tuples and the like are what the scorer will see, and what JSON lacks fails here.
        entry: dict[str, JsonValue] = json.loads(
            json.dumps({key: item[key] for key in ("question", "answer", "metadata")})
        )
        arguments: dict[str, JsonValue] = {
            "dataset": self._config.dataset,
            "entry": entry,
            "extract": list(self._config.extract),
        }
        return Task(
            prompt=self._prompt(str(item["question"])),
            verification=Verification("reasoning_gym", arguments),
            privileged="" if item["answer"] is None else str(item["answer"]),
        )

    def _prompt(self, question: str) -> Prompt:
        text = question + self._config.question_suffix
        if not self._config.chat:
            return self._config.system_prompt + text
        system = (ChatMessage("system", self._config.system_prompt),) if self._config.system_prompt else ()
        return (*system, ChatMessage("user", text))


def _create(config: ReasoningGymTasks) -> _Dataset:
    size = config.train_tasks + config.evaluation_tasks
    try:
        settings = {**_by_level(config), **config.config}
        dataset: _Dataset = reasoning_gym.create_dataset(config.dataset, seed=config.seed, size=size, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        guess = nearest(config.dataset, reasoning_gym.factory.DATASETS)
        if config.dataset not in reasoning_gym.factory.DATASETS and guess is not None:
            raise UnknownDataset(
                f"environment {config.name}: reasoning-gym has no dataset {config.dataset!r}; did you mean {guess}?"
            ) from error
        raise UnknownDataset(
            f"environment {config.name}: reasoning-gym cannot make dataset {config.dataset!r} "
            f"with settings {config.config}{_told(config)}: {error}"
        ) from error
    return dataset


def _by_level(config: ReasoningGymTasks) -> dict[str, object]:
    """The dataset's settings at the level of its curriculum; none, if no level is given.

    Raises ValueError for a dataset without a curriculum, and for an attribute or level that it does not have.
    """
    if config.level is None and not config.levels:
        return {}
    curriculum = reasoning_gym.factory.create_curriculum(config.dataset)
    attributes = curriculum.attributes
    if unknown := [name for name in config.levels if name not in attributes]:
        raise ValueError(f"its curriculum has no {', '.join(unknown)}; expected some of {', '.join(attributes)}")
    for name, attribute in attributes.items():
        if config.level is not None:
            curriculum.set_attr_level(name, min(config.level, len(attribute.levels) - 1))
        if name in config.levels:
            curriculum.set_attr_level(name, config.levels[name])
    mode = RangeAttributeMode.INCLUSIVE if config.easier_too else RangeAttributeMode.UPPER_BOUND
    made = curriculum.generate_configuration(context=DefaultCurriculumContext(mode=mode))
    return {each.name: getattr(made, each.name) for each in fields(made) if each.name not in ("seed", "size")}


def _told(config: ReasoningGymTasks) -> str:
    if config.level is None and not config.levels:
        return ""
    return f" at level {config.level} {config.levels or ''}".rstrip()
