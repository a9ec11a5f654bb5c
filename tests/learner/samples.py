"""Small trajectories and groups, and a ledger configuration, for the learner's tests."""

from collections.abc import Sequence

import numpy as np

from learner.ledger import LedgerConfig
from protocol.trajectories import (
    ErrorKind,
    FinishReason,
    Purpose,
    RewardRecord,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
)

INCARNATION = 3
"""Of the learner that granted the groups below, and published the versions of their tokens."""

INSTANCE = "g-1"
"""Of the generator's process that sampled them."""

LEDGER = LedgerConfig(
    groups_per_step=2,
    max_lag=1,
    on_lag="wait",
    straggler_timeout_s=30.0,
    lease_timeout_s=60.0,
    infrastructure_retries=2,
    data_retries=0,
)


def trajectory(
    *versions: int,
    reward: float | None = 1.0,
    error_kind: ErrorKind = "data",
    finish: FinishReason = "stop",
    token_id: int = 5,
    text: str = "four",
    incarnation: int = INCARNATION,
    instance: str = INSTANCE,
) -> Trajectory:
    """A prompt of two tokens and one sampled token for each of `versions`, which rise. No reward makes an error."""
    length = 2 + len(versions)
    record = (
        RewardRecord(verifier="test", error="the judge is ill", error_kind=error_kind)
        if reward is None
        else RewardRecord(verifier="test", reward=reward)
    )
    return Trajectory(
        token_ids=np.full(length, token_id, dtype=np.int32),
        loss_mask=np.array([0, 0] + [1] * len(versions), dtype=np.uint8),
        behavior_logprobs=np.array([0.0, 0.0] + [-0.5] * len(versions), dtype=np.float32),
        version_spans=_spans(versions, incarnation=incarnation, instance=instance),
        turns=(Turn(start=0, completion_start=2, end=length, finish_reason=finish, generator_ids=("g",)),),
        reward=record,
        completion_text=text,
    )


def _spans(versions: Sequence[int], *, incarnation: int, instance: str) -> tuple[VersionSpan, ...]:
    firsts = [index for index, version in enumerate(versions) if index == 0 or version != versions[index - 1]]
    ends = [*firsts[1:], len(versions)][: len(firsts)]
    return tuple(
        VersionSpan(version=f"{incarnation}.{versions[start]}", start=2 + start, end=2 + end, instance=instance)
        for start, end in zip(firsts, ends, strict=True)
    )


def group(
    lease_id: int,
    *trajectories: Trajectory,
    version: int = 0,
    attempt: int = 0,
    purpose: Purpose = "train",
    incarnation: int = INCARNATION,
) -> TrajectoryGroup:
    """A group of these trajectories, or of one that got a reward and one that did not earn it."""
    return TrajectoryGroup(
        incarnation=incarnation,
        lease_id=lease_id,
        attempt=attempt,
        purpose=purpose,
        environment="addition",
        task_index=lease_id,
        prompt_text="2 + 2",
        trajectories=trajectories
        or (
            trajectory(version, reward=1.0, incarnation=incarnation),
            trajectory(version, reward=0.0, incarnation=incarnation),
        ),
    )
