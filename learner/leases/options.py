"""Options of the intake, and the events that it tells others of."""

from collections.abc import Callable
from dataclasses import dataclass

from learner.leases.admission import GroupRules
from learner.leases.curriculum import Curriculum, CurriculumRules, MakeCurriculum
from learner.leases.pacing import PacingRule
from learner.leases.part_turns import MakeTurns
from learner.leases.task_draws import MakeDraws
from protocol.trajectories import TrajectoryGroup


@dataclass(frozen=True)
class IntakeOptions:
    """`environment` may be left out where only one is offered; the fingerprints are the learner's own.

    `run` is the same at every start of one run, and another for every run.
    """

    run: str
    incarnation: int
    environment: str | None
    heartbeat_every_s: float
    lease_timeout_s: float
    tokenizer: str
    chat_template: str
    rules: GroupRules
    pacing: PacingRule = "demand"
    make_curriculum: MakeCurriculum = lambda levels: Curriculum(levels=levels, rules=CurriculumRules())
    make_draws: MakeDraws | None = None
    make_turns: MakeTurns | None = None


def _untold(*_: object) -> None:
    """Nobody wants to hear of it."""


@dataclass(frozen=True, kw_only=True)
class IntakeEvents:
    """Callbacks of the intake, all in its event loop. The reasons are words of a few letters, fit for a metric's label.

    `refused`: the reason of each refused message. `left_out`: the reason of each group or attempt that came to nothing.
    `accepted`: each group that waits for its step; `forgotten`: one of these that will not be trained after all;
    `filtered`: each group that is left out on purpose. `masked`: of a group that was taken in, the tokens that were too
    old and left the loss, and the trajectories that have none in it any more. `failed_write`: a file that the disk did
    not take.
    """

    refused: Callable[[str], None] = _untold
    left_out: Callable[[str], None] = _untold
    accepted: Callable[[TrajectoryGroup], None] = _untold
    forgotten: Callable[[TrajectoryGroup, str], None] = _untold
    filtered: Callable[[TrajectoryGroup, str], None] = _untold
    masked: Callable[[int, int], None] = _untold
    failed_write: Callable[[str], None] = _untold
