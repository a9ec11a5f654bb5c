"""Warnings of `headway check` about settings that are allowed, and with which a run hardly does what was meant."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.config.models import ProcessConfig

if TYPE_CHECKING:
    from env_service.environments.interface import OfferedEnvironment
    from learner.config import LearnerConfig

_MAX_LEARNING_RATE = 0.1
"""Above it, Adam moves each weight by a tenth at each update; rates in use are below 0.01."""


def doubts(configs: Mapping[str, ProcessConfig]) -> Iterator[str]:
    """A line for each doubtful setting: what it is, what it leads to, what to do."""
    yield from _same_files(configs)
    learner = configs.get("learner")
    if learner is None:
        return
    # Deferred: an umbrella that starts the processes does without their code.
    from learner.config import LearnerConfig

    assert isinstance(learner, LearnerConfig)
    yield from _doubtful_training(learner)
    if "generator" not in configs and not learner.learns_from_files:
        yield (
            "no [generator] table: nothing samples until a generator that is started elsewhere announces itself; add "
            "the table if it is to run here"
        )


def few_tasks(learner: "LearnerConfig", environments: Mapping[str, "OfferedEnvironment"]) -> Iterator[str]:
    """A line if the environment that is trained on has fewer tasks than a step takes."""
    name = learner.rollouts.environment or next(iter(environments), "")
    if learner.learns_from_files or name not in environments:
        return
    tasks, wanted = environments[name].tasks.train_tasks, learner.groups_per_step
    if 0 < tasks < wanted:
        yield (
            f"environment {name} has {tasks} training tasks, and a step takes {wanted} groups ([learner] "
            f"groups_per_step): each step would have the same tasks, some of them twice; add tasks, or lower "
            f"groups_per_step"
        )


def _same_files(configs: Mapping[str, ProcessConfig]) -> Iterator[str]:
    for entry in getattr(configs.get("env-service"), "environments", ()):
        train, held_out = getattr(entry, "train_file", None), getattr(entry, "evaluation_file", None)
        if isinstance(train, Path) and isinstance(held_out, Path) and train.resolve() == held_out.resolve():
            yield (
                f"[[env-service.environments]] {entry.name}: evaluation_file is the train_file, {train}: evaluations "
                "would be of tasks that are trained on; give them a file of their own"
            )


def _doubtful_training(learner: "LearnerConfig") -> Iterator[str]:
    rate = learner.training.optimizer.learning_rate
    if rate > _MAX_LEARNING_RATE:
        yield (
            f"[learner] training.optimizer.learning_rate is {rate:g}: a model is destroyed at the first update; "
            "1e-6 to 1e-3 are usual"
        )
    compares = hasattr(learner.algo, "advantage_scale") or learner.algo.type == "rloo"
    if compares and not learner.learns_from_files and learner.rollouts.group_size == 1:
        yield (
            f"[learner] rollouts.group_size is 1, and {learner.algo.type} compares the rewards of a group: each "
            "advantage would be 0, and nothing learned; set it to 4 or more"
        )
