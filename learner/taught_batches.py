"""A batch as its teachers have taught it: the trainer's view of their answers, in a run and in a replay of it."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from learner.leases.intake import TakenBatch
from learner.leases.partial_credit import without_loss
from learner.teachers.config import TeacherConfig, index_of, teacher_of
from learner.teachers.teachers import GroupScores, TextRefused, Told
from learner.training.batch import Candidates, Teaching
from learner.training.step import StepMetrics
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup


@dataclass(frozen=True)
class TaughtBatch:
    """A batch, in which no token is trained of groups that nobody teaches, and the teaching of each group; None where
    there are no teachers. `lags` are the versions by which a policy that teaches was older than the learner.
    """

    batch: TakenBatch
    teaching: Sequence[Teaching] | None = None
    lags: Sequence[int] = ()

    def noted_in(self, metrics: StepMetrics) -> StepMetrics:
        """The numbers of its step with those of its teachers."""
        if not self.lags:
            return metrics
        return replace(metrics, means={**metrics.means, "teacher_lag": statistics.fmean(self.lags)})


def is_taught_by_policy(teachers: Sequence[TeacherConfig], environment: str) -> bool:
    """True if the policy is the teacher of the environment."""
    teacher = teacher_of(teachers, environment)
    return teacher is not None and teacher.policy


def taught(batch: TakenBatch, told: Sequence[Told], *, teachers: Sequence[TeacherConfig], top: int) -> TaughtBatch:
    """The batch by the answers for its groups; `top` of the likeliest tokens are compared in each place."""
    refused = [isinstance(one, TextRefused) for one in told]
    groups = [without_loss(group) if no else group for group, no in zip(batch.groups, refused, strict=True)]
    return TaughtBatch(
        replace(batch, groups=tuple(groups)),
        teaching_of(groups, told, teachers=teachers, top=top),
        [*_lags(batch, told, teachers)],
    )


def teaching_of(
    groups: Sequence[TrajectoryGroup], told: Sequence[Told], *, teachers: Sequence[TeacherConfig], top: int
) -> list[Teaching]:
    """Teacher of each group: its scores from generators, or the model of the ranks that is asked."""
    return [
        _untaught(group, top=top)
        if isinstance(scores, TextRefused)
        else _told(scores, index=index_of(teachers, group.environment))
        for group, scores in zip(groups, told, strict=True)
    ]


def _lags(batch: TakenBatch, told: Sequence[Told], teachers: Sequence[TeacherConfig]) -> Iterator[int]:
    for group, scores in zip(batch.groups, told, strict=True):
        if isinstance(scores, tuple) and is_taught_by_policy(teachers, group.environment):
            yield from (batch.version - PolicyVersion.parse(each.version).number for each in scores)


def _told(scores: GroupScores | None, *, index: int) -> Teaching:
    if scores is None:
        return Teaching(index=index)
    tops = [each.top for each in scores if each.top is not None]
    return Teaching(
        index=index,
        logprobs=[each.logprobs for each in scores],
        candidates=[Candidates(top.token_ids, top.logprobs) for top in tops] or None,
    )


def _untaught(group: TrajectoryGroup, *, top: int) -> Teaching:
    """Of a group that has no loss: what its teacher would say counts nowhere."""
    lengths = [len(one.token_ids) for one in group.trajectories]
    none = [Candidates(np.zeros((each, top), np.int32), np.zeros((each, top), np.float32)) for each in lengths]
    logprobs = [np.zeros(each, np.float32) for each in lengths]
    return Teaching(index=-1, logprobs=logprobs, candidates=none if top else None)
