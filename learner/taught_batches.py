"""A batch as its teachers have taught it: the trainer's view of their answers, in a run and in a replay of it."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from learner.average_teacher import taught_by_average, teaching_by_scores
from learner.leases.intake import TakenBatch
from learner.leases.partial_credit import without_loss
from learner.teachers.config import TeacherConfig, index_of, teacher_of
from learner.teachers.teachers import TextRefused, Told, with_silence
from learner.training.batch import Teaching
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
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
    """True if the policy, as generators serve it, is the teacher of the environment."""
    teacher = teacher_of(teachers, environment)
    return teacher is not None and teacher.policy and teacher.is_remote


def taught(
    trainer: Trainer, batch: TakenBatch, told: Sequence[Told], *, teachers: Sequence[TeacherConfig]
) -> TaughtBatch:
    """The batch by the answers for its groups. The trainer's ranks are asked where the policy's average teaches."""
    refused = [isinstance(one, TextRefused) for one in told]
    groups = [without_loss(group) if no else group for group, no in zip(batch.groups, refused, strict=True)]
    return TaughtBatch(
        replace(batch, groups=tuple(groups)),
        teaching_of(trainer, groups, told, teachers=teachers),
        [*_lags(batch, told, teachers)],
    )


def teaching_of(
    trainer: Trainer, groups: Sequence[TrajectoryGroup], told: Sequence[Told], *, teachers: Sequence[TeacherConfig]
) -> list[Teaching]:
    """Teacher of each group: its scores from generators or by the policy's average, or the model of the ranks that is
    asked.
    """
    top = trainer.preset.candidates
    averaged = taught_by_average(trainer, groups, teachers, top=top)
    return [
        averaged.get(number)
        or teaching_by_scores(
            with_silence(group, {}, top=top) if isinstance(scores, TextRefused) else scores,
            index=index_of(teachers, group.environment),
        )
        for number, (group, scores) in enumerate(zip(groups, told, strict=True))
    ]


def _lags(batch: TakenBatch, told: Sequence[Told], teachers: Sequence[TeacherConfig]) -> Iterator[int]:
    for group, scores in zip(batch.groups, told, strict=True):
        if isinstance(scores, tuple) and is_taught_by_policy(teachers, group.environment):
            said = (each.version for each in scores if each.taught)
            yield from (batch.version - PolicyVersion.parse(version).number for version in said)
