"""A scripted trainer: it takes as long as it is told, keeps what it was trained on, and looks at the truth of it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from learner.algorithms.old_tokens import LEFT_OUT_OF_OLD
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.step import StepMetrics
from learner.weights.process_group import BucketWriter, LaidOut
from services.rewards.settings import ClientSettings
from simulation.actors.engine import (
    History,
    Truth,
    context_of,
    is_behind,
    probe_logprob,
    sampled_by,
    signed_by,
    tensors_of,
)
from simulation.actors.environment import WORDS, EnvironmentScript, observation_of, opening_of
from simulation.actors.rewards import ABSURD, reward_of
from simulation.actors.teacher import taught
from simulation.world.clock import World, active
from simulation.world.cores import Cores
from simulation.world.threads import current_thread

_CLOSE = 1e-6
"""Sums of the same rewards differ by less."""
_NOT_FINITE = 1e30
"""Rewards beyond this make gradients that float32 does not hold."""

_SKIPS = "skipped_updates" in {each.name for each in fields(StepMetrics)}
"""True if the real trainer leaves such an update out, and reports it."""


@dataclass
class TrainerScript:
    """Behaviour of a trainer."""

    open_s: float = 2.0
    step_s: float = 2.0
    save_s: float = 0.5
    unhealthy: float = 0.0
    """Share of steps whose metrics are beyond the guard's limits."""
    body: int = 8
    """Elements of the large parameter."""
    durations: Sequence[float] = ()
    """Seconds of each step, again from the first one after the last; `step_s` and chance if there are none."""
    readings: Sequence[Mapping[str, float | None]] = ()
    """The guard's readings of each step, by measure, in the same way; `unhealthy` and chance if there are none."""

    def duration(self, step: int, chance: float) -> float:
        """Seconds of a step, which are counted from 0."""
        return self.durations[step % len(self.durations)] if self.durations else self.step_s * (0.5 + chance)


@dataclass(frozen=True)
class StubTensor:
    """See learner.training.policy."""

    name: str
    value: torch.Tensor


@dataclass(frozen=True)
class StubSnapshot:
    """See learner.training.policy."""

    tensors: tuple[StubTensor, ...]
    buckets: tuple[LaidOut, ...]
    shares: tuple[()] = ()


@dataclass
class Trainers:
    """All trainers of a world. `broken` is told which promise was not kept, and how; `trained` and `exported` the
    history of the weights after a step and at the end.
    """

    script: TrainerScript
    max_lag: int
    group_size: int
    teachers: int
    broken: Callable[[str, str], None]
    trained: Callable[[History], None]
    exported: Callable[[History], None]
    uniform: float = 0.1
    """Share of the tasks of which all rewards are equal, as the reward services have it."""
    groups_per_step: int | None = None
    """Groups of a step that are trained for the first time; None for any number."""
    reused_per_step: int = 0
    """Groups of a step that were trained before, at most, and each of them at most `max_reuses` times again."""
    max_reuses: int = 1
    max_lag_of_reused: int | None = None
    """Bound on the lag of those; None: `max_lag`."""
    absurd: int = 0
    """Rewards that services gave and no learner can train with: each takes a member from its group."""
    erred: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Number of errors that services gave for a task's completion, as if a worker of theirs had died."""
    unjudged: set[tuple[int, str]] = field(default_factory=set)
    """Completions that no verifier could judge, by task; others of the task may have a reward without one."""
    by_process: dict[str, "ScriptedTrainer"] = field(default_factory=dict)


class ScriptedTrainer:
    """Stands for learner.training.trainer.Trainer."""

    def __init__(self, *, algorithm: AlgorithmConfig) -> None:
        self._preset = algorithm.preset()
        self._trainers = active().part(Trainers)
        self._script = self._trainers.script
        self._truth = active().part(Truth)
        self._environment = active().part(EnvironmentScript)
        self.history: History = ()
        self.finite = True
        self.coming: tuple[int, ...] = ()
        self.bound: float = self._trainers.max_lag
        self.updates = 0
        self.begun = 0
        """Number of times that a step began before its batch was complete."""
        _sleep(self._script.open_s)

    @property
    def replays_routers(self) -> bool:
        """It has no experts."""
        return False

    @property
    def preset(self) -> Any:
        """See Trainer."""
        return self._preset

    def train_step(self, sequences: Sequence[Any], *, version: int, **_: object) -> StepMetrics:
        """See Trainer. The batch's leases were told before, as `coming`."""
        world = active()
        for sequence in sequences:
            self._check(sequence, version=version)
        self._check_once(self.coming)
        _compute(self._script.duration(len(self.history), world.random.random()))
        skipped = any(abs(sequence.reward) > _NOT_FINITE for sequence in sequences)
        if skipped and not _SKIPS:
            self.finite = False
        self.history = (*self.history, self.coming)
        self.updates += 1
        self._trainers.trained(self.history)
        return self._metrics(
            len(sequences), healthy=world.random.random() >= self._script.unhealthy, skipped=skipped and _SKIPS
        )

    def begin_step(self, sequences: Sequence[Any], *, version: int) -> None:
        """See Trainer. Generators that turn out to have lied may have sampled them still."""
        if version != len(self.history):
            self._trainers.broken("versions", f"a step of version {version} begins at {len(self.history)} steps")
        self.begun += 1
        _compute(self._script.duration(len(self.history), active().random.random()) / 4)

    def discard_step(self) -> None:
        """See Trainer."""

    def take(self, groups: Iterable[Any], *, bound: float, before: int = 0) -> None:
        """Is told of the groups of the batch that comes next, behind so many that it was told of, and of the guard's
        bound on their lag: each reward has to be the one of its own tokens.
        """
        groups = tuple(groups)
        self.coming = (*self.coming[:before], *(group.lease_id for group in groups))
        self.bound = bound
        for group in groups:
            self._check_size(len(group.trajectories), lease=group.lease_id, task=group.task_index)
            self._check_stamps(group)
            self._check_tree(group.trajectories, lease=group.lease_id)
            for trajectory in group.trajectories:
                self._check_conversation(trajectory, task=group.task_index)
                self._check_reward(trajectory, task=group.task_index)

    def _check_size(self, found: int, *, lease: int, task: int) -> None:
        """Only a time limit takes members, those that had no turn until then; an end before a fork; rewards that are
        none; and as many errors of services for an item as are borne.
        """
        wanted, limited = self._trainers.group_size, self._environment.conversation_s is not None
        limited = limited or bool(self._environment.branch_after)
        erred = sum(
            self._trainers.erred[each] >= ClientSettings.item_attempts
            for each in self._trainers.erred
            if each[0] == task
        )
        erred += sum(each[0] == task for each in self._trainers.unjudged)
        if found > wanted or (found < wanted - self._trainers.absurd - erred and not limited):
            self._trainers.broken("groups", f"the group of lease {lease} has {found} trajectories instead of {wanted}")

    def _check_stamps(self, group: Any) -> None:
        """Tokens are signed by the process that sampled them, and a group is as old as its oldest one."""
        spans = [(one, span) for one in group.trajectories for span in one.version_spans]
        for one, span in spans:
            signer = self._truth.signers.get(span.instance)
            for at in (span.start, span.end - 1) if signer is not None else ():
                if signed_by(float(one.behavior_logprobs[at])) != signer:
                    what = f"token {at} of lease {group.lease_id} is signed by {span.instance}, which did not sample it"
                    self._trainers.broken("stamps", what)
        numbers = [
            int(span.version.partition(".")[2]) for one, span in spans if one.loss_mask[span.start : span.end].any()
        ]
        if group.oldest_version != min(numbers, default=None):
            what = f"the group of lease {group.lease_id} counts as of version {group.oldest_version}: {numbers}"
            self._trainers.broken("stamps", what)

    def _check_tree(self, trajectories: Sequence[Any], *, lease: int) -> None:
        """Branches share all that is before the fork at which they part, its versions too, and no two are one."""
        branches = bool(self._environment.branch_after)
        for one in trajectories:
            if bool(one.forks) != branches:
                self._trainers.broken("trees", f"a trajectory of lease {lease} has the forks {one.forks}")
        for one, other in combinations(trajectories, 2) if branches else ():
            at = _parting(one, other)
            if at is None:
                self._trainers.broken("trees", f"two of lease {lease} went one way: {one.forks} and {other.forks}")
            elif _until(one, at) != _until(other, at):
                self._trainers.broken("trees", f"two branches of lease {lease} have other tokens before {at}")

    def _check_conversation(self, trajectory: Any, *, task: int) -> None:
        """Everything said stands behind the words to which it was said, and nothing else does."""
        due, end = opening_of(task), 0
        for number, turn in enumerate(trajectory.turns):
            said = " ".join(WORDS[token] for token in trajectory.token_ids[turn.start : turn.completion_start])
            if (turn.start, said) != (end, due):
                self._trainers.broken("conversations", f"'{said}' stands before turn {number} of task {task}: '{due}'")
            end, due = turn.end, observation_of(task, number, self._heard(trajectory, turn))
            words = [WORDS[token] for token in trajectory.token_ids[turn.completion_start : turn.end]]
            if self._environment.stop in words[:-1]:
                self._trainers.broken("conversations", f"turn {number} of task {task} goes on behind its end: {words}")

    def _heard(self, trajectory: Any, turn: Any) -> str:
        return self._environment.heard(trajectory.token_ids[turn.completion_start : turn.end])

    def _check_reward(self, trajectory: Any, *, task: int) -> None:
        """A turn that a time limit ended has earned nothing yet."""
        reward = trajectory.reward.reward
        if reward is None:
            return
        if abs(reward) > ABSURD:
            self._trainers.broken("rewards", f"a trajectory of task {task} is given the absurd reward {reward}")
            return
        texts = [self._heard(trajectory, turn) for turn in trajectory.turns]
        earned = [self._environment.earned(task, number, text) for number, text in enumerate(texts)]
        judged = 0.0
        if not trajectory.stop_reason:
            judged = reward_of(task=task, completion=texts[-1], uniform=self._trainers.uniform)
        sums = {sum(earned) + judged}
        if trajectory.stop_reason == "time_limit":
            sums.add(sum(earned[:-1]))
        if not any(abs(reward - each) < _CLOSE for each in sums):
            what = f"the words {texts} of task {task} are given {reward}, their reward is {sorted(sums)}"
            self._trainers.broken("rewards", what)
        given = [turn.reward for turn in trajectory.turns]
        if any(each is not None and abs(each - due) > _CLOSE for each, due in zip(given[:-1], earned, strict=False)):
            self._trainers.broken("rewards", f"the turns {texts} of task {task} are given {given}, due is {earned}")

    def _check(self, sequence: Any, *, version: int) -> None:
        """By the logprobs, which tell who sampled, and not by the stamps."""
        if version != len(self.history):
            self._trainers.broken("versions", f"a step of version {version} on weights of {len(self.history)} steps")
        again = sequence.origin is not None and self._was_trained(self.coming[sequence.origin.group])
        context = 0
        for at, (token, is_sampled, logprob, lag) in enumerate(
            zip(sequence.token_ids, sequence.loss_mask, sequence.behavior_logprobs, sequence.lags, strict=True)
        ):
            if is_sampled:
                number, known = sampled_by(float(logprob))
                self._check_token(number, known, context=context, lag=int(lag), version=version)
                self._check_lag(number, version=version, again=again)
            context = context_of((token,), context)
            if is_sampled and self._trainers.teachers:
                self._check_teacher(sequence.teacher_logprobs, at=at, due=taught(context))

    def _check_teacher(self, logprobs: Sequence[float], *, at: int, due: float) -> None:
        if at >= len(logprobs) or float(logprobs[at]) != due:
            self._trainers.broken("teachers", f"token {at} is not taught what its teacher says of it, {due}")

    def _check_token(self, number: int, known: int, *, context: int, lag: int, version: int) -> None:
        if number <= 0 or number >= len(self._truth.histories):
            self._trainers.broken("half weights", "a token was sampled by weights that are of no version")
            return
        history = self._truth.histories[number]
        if not is_behind(context, known):
            self._trainers.broken("contexts", f"a token of version {len(history)} was sampled behind other tokens")
        if history != self.history[: len(history)]:
            self._trainers.broken("ancestry", f"a token of version {len(history)} is not of this history")
        if len(history) != version - lag:
            self._trainers.broken("stamps", f"a token stamped {version - lag} was sampled by {len(history)}")

    def _check_lag(self, number: int, *, version: int, again: bool) -> None:
        """A group that is trained again may have a bound of its own, but none above one that the guard has lowered."""
        if number <= 0 or number >= len(self._truth.histories):
            return
        trainers, sampled_at = self._trainers, len(self._truth.histories[number])
        most, bound = trainers.max_lag, self.bound
        if again and trainers.max_lag_of_reused is not None:
            most, bound = trainers.max_lag_of_reused, trainers.max_lag_of_reused if bound >= most else bound
        if version - sampled_at > most:
            trainers.broken("max_lag", f"a token of version {sampled_at} is trained at {version}")
        elif version - sampled_at > bound:
            what = f"a token of version {sampled_at} is trained at {version} under a bound of {bound}"
            trainers.broken("the guard's bound", what)

    def _was_trained(self, lease: int) -> bool:
        return any(lease in batch for batch in self.history)

    def _check_once(self, leases: tuple[int, ...]) -> None:
        trained, trainers = Counter(lease for batch in self.history for lease in batch), self._trainers
        again = [lease for lease in leases if lease in trained]
        if len(again) > trainers.reused_per_step or len(set(leases)) < len(leases):
            trainers.broken("trained twice", f"leases {again} are in the history of the weights already")
        for lease in again:
            if trained[lease] > trainers.max_reuses:
                trainers.broken("trained twice", f"lease {lease} was trained {trained[lease]} times already")
        if trainers.groups_per_step not in (None, len(leases) - len(again)):
            trainers.broken("batches", f"{len(leases) - len(again)} of {leases} are new: {trainers.groups_per_step}")

    def host_copy(self, *, bucket_bytes: int = 0, shared: bool = False, mapped: bool = False) -> StubSnapshot:
        """See Trainer."""
        del shared, mapped  # it has one rank, and generators that see no memory of another process
        number = self._truth.number_of(self.history)
        tensors = tensors_of(self.history, number, finite=self.finite, size=self._script.body)
        writer = BucketWriter(bucket_bytes=bucket_bytes)
        copies = tuple(StubTensor(name, writer.add(name, value, dtype=value.dtype)) for name, value in tensors)
        return StubSnapshot(copies, writer.buckets())

    def probe_logprobs(self, texts: Sequence[Any]) -> NDArray[np.float32]:
        """See Trainer: of one text or of several."""
        number = self._truth.number_of(self.history)
        rows = texts if texts and not isinstance(texts[0], int) else [texts]
        logprobs = [probe_logprob(number, int(token), finite=self.finite) for row in rows for token in row[1:]]
        return np.array(logprobs, dtype=np.float32)

    def save(self, directory: Path) -> None:
        """See Trainer."""
        _sleep(self._script.save_s)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"history": self.history, "finite": self.finite, "updates": self.updates})
        (directory / "weights.json").write_text(text, encoding="utf-8")
        if not self.finite:
            self._trainers.broken(
                "non-finite checkpoint", f"weights that are not finite are saved in {directory.parent.name}"
            )

    def load(self, directory: Path) -> None:
        """See Trainer."""
        found = json.loads((directory / "weights.json").read_text(encoding="utf-8"))
        self.history = tuple(tuple(batch) for batch in found["history"])
        self.finite, self.updates = found["finite"], found["updates"]

    def export(self, directory: Path) -> None:
        """See Trainer."""
        directory.mkdir(parents=True, exist_ok=True)
        self._trainers.exported(self.history)

    def close(self) -> None:
        """See Trainer."""

    def _metrics(self, sequences: int, *, healthy: bool, skipped: bool) -> StepMetrics:
        means = {} if self._trainers.max_lag_of_reused is None else {LEFT_OUT_OF_OLD: 0.0}
        readings: dict[str, Any] = {
            "loss": 0.1, "entropy": 1.0, "mismatch_kl": 0.001, "behavior_kl": 0.01 if healthy else 5.0,
            "importance_ratio_mean": 1.0, "importance_ratio_max": 1.5, "effective_sample_share": 0.9,
            "clip_fraction": None, "correction_fraction": 0.0, "means": means, "grad_norm": 1.0, "learning_rate": 1e-5,
            "tokens": 10 * sequences, "trained_tokens": 5 * sequences, "sequences": sequences, "microbatches": 1,
            "updates": 1, "forward_backward_s": 1.0, "optimizer_s": 0.1,
        }  # fmt: skip
        if self._script.readings:
            readings |= self._script.readings[(len(self.history) - 1) % len(self._script.readings)]
        if skipped:
            readings |= {"skipped_updates": 1, "skipped_in_row": 1}
        return StepMetrics(**readings)


@dataclass(frozen=True)
class OpenTrainer:
    """Stands for learner.training_setup.OpenTrainer."""

    trainer: ScriptedTrainer

    def close(self) -> None:
        """See there."""


def _parting(one: Any, other: Any) -> int | None:
    """The token before which two branches are one; None if they never part, or part at two places."""
    for ours, theirs in zip(one.forks, other.forks, strict=False):
        if ours.at != theirs.at:
            return None
        if ours.branch != theirs.branch:
            return int(ours.at)
    return None


def _until(one: Any, at: int) -> Any:
    """Tokens, logprobs and versions before a place."""
    spans = [(span.version, span.start, span.end, span.cache) for span in one.version_spans if span.start < at]
    return one.token_ids[:at].tolist(), one.behavior_logprobs[:at].tolist(), spans


def _compute(seconds: float) -> None:
    world, thread = active(), current_thread()
    if thread is None or not world.has(Cores):
        _sleep(seconds)
    else:
        world.part(Cores).block(thread, seconds)


def _sleep(seconds: float) -> None:
    thread = current_thread()
    if thread is None:
        assert World.active is None or seconds == 0, "the trainer works in its thread"
        return
    thread.sleep(seconds)
