"""From groups of trajectories to what the trainer takes: tokens, masks, behavior logprobs, rewards and lags."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from learner.algorithms.preset import Preset
from learner.training.batch import TrainSequence, TrainTurn
from protocol.trajectories import Trajectory, TrajectoryGroup, Turn


class LagBoundBroken(AssertionError):
    """A token older than `max_lag` was about to enter a loss."""


class ComponentMissing(RuntimeError):
    """An algorithm weighs a component that a trajectory's reward does not have."""


@dataclass(frozen=True)
class Teaching:
    """Who teaches a group: the index of a model that the ranks hold, or logprobs of each trajectory, [T] each."""

    index: int = 0
    logprobs: Sequence[NDArray[np.float32]] | None = None

    def of(self, trajectory: int) -> dict[str, Any]:
        """The fields of a TrainSequence that it sets."""
        return {"teacher": self.index} if self.logprobs is None else {"teacher_logprobs": self.logprobs[trajectory]}


def sequences_of(
    groups: Sequence[TrajectoryGroup],
    *,
    version: int,
    max_lag: int,
    preset: Preset,
    teaching: Sequence[Teaching] | None = None,
) -> list[TrainSequence]:
    """One sequence for each trajectory that the preset selects of its group; of a pair the chosen one first.

    `version` is the learner's; `teaching` says of each group who teaches it. Raises LagBoundBroken rather than letting
    a token with lag > max_lag through, and ComponentMissing.
    """
    return [
        replace(
            _sequence(group.trajectories[index], version=version, max_lag=max_lag),
            components=_components(group.trajectories[index], preset, environment=group.environment),
            group=number,
            pair=number if preset.paired else -1,
            **({} if teaching is None else teaching[number].of(index)),
        )
        for number, group in enumerate(groups)
        for index in _selected(group, preset)
    ]


def _selected(group: TrajectoryGroup, preset: Preset) -> Sequence[int]:
    rewards = [_reward(trajectory, group) for trajectory in group.trajectories]
    return range(len(rewards)) if preset.select is None else preset.select(rewards)


def _reward(trajectory: Trajectory, group: TrajectoryGroup) -> float:
    reward = trajectory.reward.reward
    assert reward is not None, f"lease {group.lease_id}: a trajectory without a reward reached the batch"
    return reward


def _components(trajectory: Trajectory, preset: Preset, *, environment: str) -> tuple[float, ...]:
    have = trajectory.reward.components
    missing = [name for name in preset.components if name not in have]
    if missing:
        raise ComponentMissing(
            f"algo {preset.name} weighs the reward components {', '.join(preset.components)}, and a reward of "
            f"environment {environment} has no {missing[0]}: verifier {trajectory.reward.verifier} gave "
            f"{', '.join(sorted(have)) or 'none'}. Name in algo.components what the verifier gives, or use a verifier "
            "that gives it"
        )
    return tuple(have[name] for name in preset.components)


def _sequence(trajectory: Trajectory, *, version: int, max_lag: int) -> TrainSequence:
    mask = trajectory.loss_mask.astype(np.bool_)
    lags = np.where(mask, version - trajectory.token_versions(), 0).astype(np.int32)
    if lags.max(initial=0) > max_lag or lags.min(initial=0) < 0:
        raise LagBoundBroken(f"lags {lags.min()} to {lags.max()} at version {version}; the bound is 0 to {max_lag}")
    return TrainSequence(
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        behavior_logprobs=trajectory.behavior_logprobs,
        lags=lags,
        mixed_versions=len({span.version for span in trajectory.version_spans}) > 1,
        reward=trajectory.reward.reward or 0.0,
        truncated=trajectory.turns[-1].finish_reason == "length",
        turns=tuple(TrainTurn(start=turn.start, state=_state(trajectory, turn)) for turn in trajectory.turns),
    )


def _state(trajectory: Trajectory, turn: Turn) -> int:
    """What the policy was given in this turn, as a number: the same tokens, the same number."""
    given = np.ascontiguousarray(trajectory.token_ids[turn.start : turn.completion_start])
    digest: int = xxhash.xxh3_64_intdigest(given.tobytes())
    return digest - (1 << 63)
