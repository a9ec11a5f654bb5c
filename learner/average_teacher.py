"""Teaching by the average of the policy, which the trainer's ranks hold.

group ─▶ the teacher's prompt, then the policy's own tokens ─▶ Trainer.average_scores ─▶ Teaching of the group
"""

from collections.abc import Sequence

import numpy as np

from learner.teachers.config import TeacherConfig, teacher_of
from learner.teachers.teachers import (
    GroupScores,
    TeacherFailed,
    TeacherScores,
    behind_the_opening,
    members_taught,
    placed,
    with_silence,
)
from learner.training.batch import Candidates, Teaching, TrainSequence
from learner.training.trainer import Trainer
from protocol.trajectories import Trajectory, TrajectoryGroup


def taught_by_average(
    trainer: Trainer, groups: Sequence[TrajectoryGroup], teachers: Sequence[TeacherConfig], *, top: int
) -> dict[int, Teaching]:
    """The teaching of each of `groups` whose teacher is the policy's average, by its place among them.

    `top` of its likeliest tokens are told in each place, 0 for none. Raises TeacherFailed for a group without a prompt
    for its teacher.
    """
    places = [number for number, group in enumerate(groups) if _is_of_average(group, teachers)]
    if not places:
        return {}
    members = [
        (number, place, one)
        for number in places
        for place, one in members_taught(groups[number], sees_more=True).items()
    ]
    shown = [_as_shown(groups[number], one) for number, _, one in members]
    found = trainer.average_scores(shown, top=top) if shown else []
    told: dict[int, dict[int, TeacherScores]] = {number: {} for number in places}
    for (number, place, one), sequence, scores in zip(members, shown, found, strict=True):
        behind = len(sequence.token_ids) - len(behind_the_opening(one))
        told[number][place] = placed(one, scores, given=behind)
    width = min(top, trainer.vocabulary)
    return {n: teaching_by_scores(with_silence(groups[n], scores, top=width), index=-1) for n, scores in told.items()}


def _is_of_average(group: TrajectoryGroup, teachers: Sequence[TeacherConfig]) -> bool:
    teacher = teacher_of(teachers, group.environment)
    return teacher is not None and teacher.average is not None


def _as_shown(group: TrajectoryGroup, trajectory: Trajectory) -> TrainSequence:
    """The trajectory behind the prompt that the teacher is shown; marked is what was trained."""
    if group.teacher_prompt is None:
        raise TeacherFailed(
            f"the average of the policy is shown privileged text, and lease {group.lease_id} of environment "
            f"{group.environment} came without any: set teacher_hint of that environment in its env_service"
        )
    prompt, behind = np.array(group.teacher_prompt, np.int32), behind_the_opening(trajectory)
    start = trajectory.turns[0].completion_start
    mask = trajectory.loss_mask[start : start + len(behind)].astype(np.bool_)
    return TrainSequence.supervised(
        token_ids=np.concatenate([prompt, behind]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(len(prompt), np.bool_), mask]),
    )


def teaching_by_scores(scores: GroupScores | None, *, index: int) -> Teaching:
    """The teaching of a group by what its teacher told; without that by the model of this index among the ranks'."""
    if scores is None:
        return Teaching(index=index)
    tops = [each.top for each in scores if each.top is not None]
    return Teaching(
        index=index,
        logprobs=[each.logprobs for each in scores],
        candidates=[Candidates(top.token_ids, top.logprobs) for top in tops] or None,
        taught=[each.taught for each in scores],
    )
