"""Groups that teachers cannot be asked of fail where they come in, or where a run is taken up again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.leases.admission import GroupRules, admissible
from learner.leases.filters import GroupFilter
from learner.teachers.config import TeacherConfig
from learner.teachers.limits import TeachingLimits
from protocol.messages import FailedLease, PeerRefusal, Welcome
from protocol.trajectories import TrajectoryGroup
from tests.learner.envs import ADDITION, learner
from tests.learner.samples import group, trajectory
from tests.learner.teachers.test_teachers import two_turns

BEHIND = {"urls": ["http://127.0.0.1:1"]}
HINTED = {**BEHIND, "privileged": True}
POLICY = {"policy": True}
AVERAGE = {**POLICY, "average": 0.9}
TWO_TEXTS = two_turns().model_copy(update={"token_ids": np.arange(8, dtype=np.int32), "sequence_starts": (4,)})


def limits(
    given: dict[str, Any],
    *,
    top: int = 0,
    served: tuple[int, ...] = (),
    refused: int | None = None,
    positions: int | None = None,
) -> TeachingLimits:
    made = TeacherConfig.model_validate({"name": "t", **given})
    return TeachingLimits(
        (made,), top=top, served=lambda: served, refused={"t": refused}.__getitem__, positions=positions
    )


def shown(*prompt: int) -> TrajectoryGroup:
    """The longest text behind the prompt has two tokens, which were sampled."""
    return group(1, trajectory(0), trajectory(0, 0)).model_copy(update={"teacher_prompt": prompt})


@pytest.mark.parametrize(
    ("teaching", "came", "reason", "data_fault"),
    [
        (limits(POLICY), group(1), "no prompt for teacher t: .* set teacher_hint", False),
        (limits(HINTED), shown(), "no prompt for teacher t", False),
        (limits(BEHIND), group(1), None, False),
        (limits({"path": "m"}), group(1, TWO_TEXTS), None, False),
        (limits(BEHIND), group(1, TWO_TEXTS), "reads a trajectory as one text, and one has 2", True),
        (limits(POLICY), group(1).model_copy(update={"solved_reward": 1.0}), None, False),
        (limits(POLICY, served=(6,)), shown(1, 2, 3, 4).model_copy(update={"solved_reward": 1.0}), None, False),
        (limits(AVERAGE), group(1), "no prompt for teacher t: .* set teacher_hint", False),
        (
            limits(AVERAGE),
            group(1, TWO_TEXTS).model_copy(update={"teacher_prompt": (1,)}),
            "one text, and one has 2",
            True,
        ),
        (limits(AVERAGE, top=1 << 19, served=(9, 6)), shown(1, 2, 3, 4, 5, 6, 7), None, False),
        (limits(AVERAGE, positions=5), shown(1, 2, 3, 4), None, False),
        (limits(AVERAGE, positions=4), shown(1, 2, 3, 4), "would read 5 tokens, .* learner.model takes 4 by its", True),
        (limits(POLICY, positions=4), shown(1, 2, 3, 4), None, False),
        (limits(POLICY, served=(9, 6)), shown(1, 2, 3), None, False),
        (limits(POLICY, served=(9, 6)), shown(1, 2, 3, 4), "would read 6 tokens, .* generators take 5, one less", True),
        (limits({**HINTED, "max_model_len": 6}), shown(1, 2, 3, 4), "would read 6 tokens", True),
        (limits({**BEHIND, "max_model_len": 4}), group(1, trajectory(0, 0)), "would read 4 tokens", True),
        (limits(BEHIND, top=1 << 19), group(1, trajectory(0)), "in 3 places: at most 2 tokens are taken with so", True),
        (limits(BEHIND, refused=4), group(1, trajectory(0, 0)), "has refused a text of 4 as too long: raise", True),
        (limits(BEHIND, refused=5), group(1, trajectory(0, 0)), None, False),
        (limits(POLICY), shown(1, 10), "token id 10 of teacher_prompt is outside", True),
    ],
)
def test_a_group_that_its_teacher_cannot_be_asked_of_fails_by_name(
    teaching: TeachingLimits, came: TrajectoryGroup, reason: str | None, data_fault: bool
) -> None:
    rules = GroupRules(vocabulary_size=10, min_group_size=1, filters=GroupFilter(), teaching=teaching)
    found = admissible(came, rules=rules, belongs=lambda _: True)
    if reason is None:
        assert found == came
        return
    assert isinstance(found, FailedLease)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)
    assert found.data_fault is data_fault


async def test_after_a_restart_groups_without_a_teachers_prompt_are_granted_again(tmp_path: Path) -> None:
    async with learner(tmp_path, teaching=limits(POLICY)) as ours, ours.env("e") as env:
        ours.intake.readmit([group(0), shown(1, 2)])
        await env.send(env.hello(environments=(ADDITION.model_copy(update={"teacher_hint": True}),)))
        await env.next(Welcome)
        assert [lease.lease_id for lease in await env.leases(3)] == [0, 2, 3]
        assert ours.intake.books().buffered == 1


async def test_an_environment_without_a_hint_for_its_teacher_is_refused_at_its_hello(tmp_path: Path) -> None:
    async with learner(tmp_path, teaching=limits(POLICY)) as ours, ours.env("e") as env:
        await env.send(env.hello())
        refused = await env.next(PeerRefusal)
    assert refused.reason == "hello"
    assert "teacher t is shown privileged text, and environment addition has none for it: set" in refused.message
    async with learner(tmp_path / "evaluates", teaching=limits(POLICY), total_groups=0) as ours, ours.env("e") as env:
        await env.send(env.hello())
        await env.next(Welcome)


async def test_leases_ask_for_a_teachers_prompt_where_a_teacher_is_shown_more(tmp_path: Path) -> None:
    hinted = (ADDITION.model_copy(update={"teacher_hint": True}),)
    elsewhere: dict[str, Any] = {**HINTED, "environments": ["words"]}
    cases: list[tuple[dict[str, Any], bool]] = [(POLICY, True), (HINTED, True), (BEHIND, False), (elsewhere, False)]
    for place, (given, asks) in enumerate(cases):
        async with learner(tmp_path / str(place), teaching=limits(given)) as ours, ours.env("e") as env:
            await env.send(env.hello(environments=hinted))
            await env.next(Welcome)
            await ours.serve(0)
            leases = await env.leases(4)
            assert {lease.teacher_prompt for lease in leases} == {asks}, given
