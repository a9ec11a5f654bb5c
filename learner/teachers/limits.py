"""The groups that teachers can be asked of: others fail where they come in, not at their step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from learner.teachers.config import TeacherConfig, teacher_of
from protocol.generation import MAX_SCORED_TOKENS
from protocol.trajectories import TrajectoryGroup


@dataclass(frozen=True)
class TeachingLimits:
    """`top` of the likeliest tokens are asked for in each place; `served` gives the longest texts of the run's
    generators that serve, in tokens, for a teacher that is the policy; `refused` the length of the shortest text
    that a teacher, by its name, has refused as too long. `positions` are the most tokens that the learner's own model
    takes, which is asked where the policy's average teaches; None: its config.json does not say it.
    """

    teachers: Sequence[TeacherConfig] = ()
    top: int = 0
    served: Callable[[], Iterable[int]] = tuple
    refused: Callable[[str], int | None] = lambda name: None
    positions: int | None = None

    def shown_more(self, environment: str) -> TeacherConfig | None:
        """The environment's teacher, if it is shown privileged text."""
        teacher = teacher_of(self.teachers, environment)
        return teacher if teacher is not None and teacher.sees_more else None

    def lack(self, group: TrajectoryGroup) -> str | None:
        """The reason why a group was sampled for other teachers than these; None if it may be of use."""
        teacher = self.shown_more(group.environment)
        if teacher is None or group.teacher_prompt or group.solved_reward is not None:
            return None
        return f"the group has no prompt for teacher {teacher.name}: {without_hint(teacher, group.environment)}"

    def fault(self, group: TrajectoryGroup) -> str | None:
        """The reason why the group's teacher cannot be asked of it, which would be so again; None if it can be."""
        teacher = teacher_of(self.teachers, group.environment)
        if teacher is None or not (teacher.is_remote or teacher.sees_more):
            return None
        if several := max(len(one.sequence_starts) for one in group.trajectories):
            return (
                f"teacher {teacher.name} reads a trajectory as one text, and one has {1 + several}: expected "
                'history = "append" in the rules of its environment, no on_full that makes a context shorter, and a '
                "chat template that leaves what was said before as it was"
            )
        longest = self._longest(group, teacher)
        if not teacher.is_remote:
            return self._beyond_positions(teacher, longest)
        asked = MAX_SCORED_TOKENS // max(1, self.top)
        if longest > asked:
            return (
                f"teacher {teacher.name} would be asked for the {self.top} likeliest tokens in {longest} places: at "
                f"most {asked} tokens are taken with so many; lower algo.teacher_tokens"
            )
        taken = [*(self.served() if teacher.policy else ()), *filter(None, [teacher.max_model_len])]
        if taken and longest >= min(taken):
            return (
                f"teacher {teacher.name} would read {longest} tokens, prompt and hint included: its generators take "
                f"{min(taken) - 1}, one less than engine.max_model_len; raise that, or shorten the hint or completions"
            )
        refused = self.refused(teacher.name)
        if refused is not None and longest >= refused:
            return (
                f"teacher {teacher.name} would read {longest} tokens, prompt and hint included, and has refused a text "
                f"of {refused} as too long: raise engine.max_model_len of its generators, or shorten the hint or "
                "completions"
            )
        return None

    def _beyond_positions(self, teacher: TeacherConfig, longest: int) -> str | None:
        if self.positions is None or longest - 1 <= self.positions:  # the last one is only predicted
            return None
        return (
            f"teacher {teacher.name} would read {longest - 1} tokens, prompt and hint included: learner.model takes "
            f"{self.positions} by its config.json; shorten the hint or completions"
        )

    def _longest(self, group: TrajectoryGroup, teacher: TeacherConfig) -> int:
        """Tokens of the longest text that the teacher is given: up to the last trained token."""
        shown = len(group.teacher_prompt or ()) if teacher.sees_more else None
        lengths = [
            int(np.flatnonzero(one.loss_mask)[-1]) + 1 + (0 if shown is None else shown - one.turns[0].completion_start)
            for one in group.trajectories
            if one.loss_mask.any() and (group.teaches(one) or not teacher.sees_more)
        ]
        return max(lengths, default=0)


def without_hint(teacher: TeacherConfig, environment: str) -> str:
    """The refusal of an environment that has no hint for its teacher."""
    return (
        f"teacher {teacher.name} is shown privileged text, and environment {environment} has none for it: set "
        "teacher_hint in its entry of the env_service, of each part if it is a mix, or remove the teacher's policy or "
        "privileged"
    )
