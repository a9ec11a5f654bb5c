"""Warnings of `headway check` about settings that are allowed, and with which a run hardly does what was meant."""

from collections.abc import Collection, Iterator, Mapping
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
    tasks, wanted = environments[name].tasks.train_tasks, learner.fresh_per_step
    if 0 < tasks < wanted:
        new = "new groups" if learner.reused_per_step else "groups"
        yield (
            f"environment {name} has {tasks} training tasks, and a step takes {wanted} {new} ([learner] "
            f"groups_per_step): each step would have the same tasks, some of them twice; add tasks, or lower "
            f"groups_per_step"
        )


def wrong_success(
    learner: "LearnerConfig", environments: Mapping[str, "OfferedEnvironment"], *, shares: Collection[str]
) -> Iterator[str]:
    """A line if no held-out task of the environment can be solved as `success_reward` has it, or none can fail.
    `shares` are verifiers of the configuration that give 0 to 1.
    """
    name, success = learner.rollouts.environment or next(iter(environments), ""), learner.evaluation.success_reward
    evaluates = learner.evaluation.tasks or learner.evaluation.final_tasks
    if learner.learns_from_files or not evaluates or name not in environments:
        return
    found = _range_of_rewards(environments[name], shares)
    if found is None:
        return
    low, high = found
    said = f"[learner] evaluation.success_reward is {success!r}, and the held-out tasks of environment {name} give"
    if high < success:
        yield (
            f"{said} {high!r} at most: accuracy would be 0 however good the policy is; set it to what a right answer "
            "is worth"
        )
    elif low >= success:
        yield (
            f"{said} {low!r} at least: accuracy would be 1 however bad the policy is; set it to what a right answer is "
            "worth"
        )


def _range_of_rewards(environment: "OfferedEnvironment", shares: Collection[str]) -> tuple[float, float] | None:
    """The lowest and the highest reward of its held-out tasks; None if that of one of them is not known."""
    from env_service.environments.catalog import held_out_verifications
    from reward_service.verifiers.ranges import reward_range

    lows, highs = [], []
    for one in held_out_verifications(environment):
        found = reward_range(one.verifier, one.arguments, shares=shares)
        if found is None:
            return None
        lows.append(found[0])
        highs.append(found[1])
    return (min(lows), max(highs)) if lows else None


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
    if learner.doubt_of_age:
        yield f"[learner] {learner.doubt_of_age}"
    compares = hasattr(learner.algo, "advantage_scale") or learner.algo.type == "rloo"
    if compares and not learner.learns_from_files and learner.rollouts.group_size == 1:
        yield (
            f"[learner] rollouts.group_size is 1, and {learner.algo.type} compares the rewards of a group: each "
            "advantage would be 0, and nothing learned; set it to 4 or more"
        )
