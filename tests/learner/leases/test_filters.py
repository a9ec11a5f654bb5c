"""Groups that are left out, and when that ends a run: the rules by themselves, then in an intake on real sockets."""

import asyncio
from pathlib import Path

import pytest

from learner.journal.journal import LoggedFilter
from learner.leases.admission import GroupRules, admissible
from learner.leases.dead_letters import RunAborted
from learner.leases.filters import FilterReason, FilterRounds, GroupFilter
from learner.weights.provenance import is_recalled
from protocol.messages import FailedLease
from protocol.model import PolicyVersion
from protocol.trajectories import Fork, GreedyBaseline, RewardRecord, TrajectoryGroup, VersionSpan
from tests.learner.envs import learner
from tests.learner.samples import INCARNATION, INSTANCE, group, trajectory


def rewarded(*rewards: float, lease_id: int = 0, version: int = 0) -> TrajectoryGroup:
    return group(lease_id, *(trajectory(version, reward=reward) for reward in rewards))


# The rules


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0, 0.0), FilterReason.UNIFORM),
        ((0.3, 0.3), FilterReason.UNIFORM),
        ((0.0, 0.0, 1e-9), None),
        ((1.0,), FilterReason.UNIFORM),
    ],
)
def test_a_group_without_spread_is_left_out_where_that_is_wanted(
    rewards: tuple[float, ...], reason: FilterReason | None
) -> None:
    assert GroupFilter(drop_uniform=True).reason(rewarded(*rewards)) is reason
    assert GroupFilter().reason(rewarded(*rewards)) is None


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.25), FilterReason.TOO_HARD),  # mean 0.125
        ((0.25, 0.25), None),  # a mean equal to the bound is inside
        ((0.5, 1.0), None),  # 0.75
        ((1.0, 1.0, 0.5, 1.0), FilterReason.TOO_EASY),  # 0.875
    ],
)
def test_a_group_is_left_out_for_a_mean_reward_outside_of_the_range(
    rewards: tuple[float, ...], reason: FilterReason | None
) -> None:
    assert GroupFilter(min_mean_reward=0.25, max_mean_reward=0.75).reason(rewarded(*rewards)) is reason


def greedy_of(record: RewardRecord, *, version: int = 0) -> GreedyBaseline:
    spans = (VersionSpan(version=f"{INCARNATION}.{version}", start=2, end=3, instance="g-2"),)
    return GreedyBaseline(reward=record, version_spans=spans, sampled_tokens=1)


def test_equal_rewards_that_differ_from_the_greedy_answers_teach() -> None:
    rules = GroupFilter(drop_uniform=True, greedy_baseline=True)
    for reward, reason in ((0.0, None), (1.0, FilterReason.UNIFORM)):
        greedy = greedy_of(RewardRecord(verifier="test", reward=reward))
        made = rewarded(1.0, 1.0).model_copy(update={"greedy_baseline": greedy})
        assert rules.reason(made) is reason
        assert GroupFilter(drop_uniform=True).reason(made) is FilterReason.UNIFORM, "another algorithm does not ask"


@pytest.mark.parametrize(
    ("record", "version", "reason", "data_fault"),
    [
        (None, 0, "the group has no greedy answer", False),
        (RewardRecord(verifier="test", error="it is ill", error_kind="data"), 0, "no reward: test: it is ill", True),
        (RewardRecord(verifier="test", error="away", error_kind="infrastructure"), 0, "no reward: test: away", False),
        (RewardRecord(verifier="test", reward=11.0), 0, "a reward of 11 is beyond rollouts.max_reward", True),
        (RewardRecord(verifier="test", reward=1.0), 9, "policy version 3.9, which is not in", False),
        (RewardRecord(verifier="test", reward=1.0), 0, None, False),
    ],
)
def test_a_group_that_is_to_be_compared_with_a_greedy_answer_has_one_in_order(
    record: RewardRecord | None, version: int, reason: str | None, data_fault: bool
) -> None:
    rules = GroupRules(
        vocabulary_size=100, min_group_size=1, filters=GroupFilter(), max_reward=10.0, greedy_baseline=True
    )
    greedy = None if record is None else greedy_of(record, version=version)
    made = rewarded(1.0, 0.0).model_copy(update={"greedy_baseline": greedy})
    admitted = admissible(made, rules=rules, belongs=lambda each: each.number < 9)
    if reason is None:
        assert admitted is made
        return
    assert isinstance(admitted, FailedLease)
    assert reason in admitted.reason
    assert admitted.data_fault is data_fault


def test_a_greedy_answer_has_to_be_proven_and_belongs_to_the_history_like_others() -> None:
    greedy = greedy_of(RewardRecord(verifier="test", reward=1.0), version=2)
    made = rewarded(1.0).model_copy(update={"greedy_baseline": greedy})
    assert made.stamps == {(INSTANCE, f"{INCARNATION}.0"), ("g-2", f"{INCARNATION}.2")}
    distrusted = {"g-2": PolicyVersion(INCARNATION, 1)}
    assert is_recalled(made, distrusted.get)
    assert not is_recalled(rewarded(1.0), distrusted.get)


def test_a_game_is_left_out_only_if_it_teaches_none_of_its_players_anything() -> None:
    def game(x: tuple[float, float], o: tuple[float, float]) -> TrajectoryGroup:
        rewards = [(name, reward) for name, pair in (("x", x), ("o", o)) for reward in pair]
        return group(0, *(trajectory(0, reward=r).model_copy(update={"player": name}) for name, r in rewards))

    # x wins each time: the rewards differ, and nobody did better than another who played the same part.
    assert GroupFilter(drop_uniform=True).reason(game((1.0, 1.0), (-1.0, -1.0))) is FilterReason.UNIFORM
    assert GroupFilter(drop_uniform=True).reason(game((1.0, 1.0), (-1.0, 0.5))) is None
    assert GroupFilter(min_mean_reward=-0.5).reason(game((1.0, 1.0), (-1.0, -1.0))) is None


def test_a_player_of_whom_too_little_was_scored_leaves_the_group() -> None:
    rules = GroupRules(vocabulary_size=100, min_group_size=2, filters=GroupFilter())

    def game(*rewards: tuple[str, float | None]) -> TrajectoryGroup:
        return group(0, *(trajectory(0, reward=r).model_copy(update={"player": name}) for name, r in rewards))

    kept = admissible(game(("x", 1.0), ("o", 0.0), ("x", 0.0), ("o", None)), rules=rules, belongs=lambda _: True)
    assert isinstance(kept, TrajectoryGroup)
    assert [(one.player, one.reward.reward) for one in kept.trajectories] == [("x", 1.0), ("x", 0.0)]

    failed = admissible(game(("x", 1.0), ("o", 0.0)), rules=rules, belongs=lambda _: True)
    assert isinstance(failed, FailedLease)
    assert "has 1 trajectories; at least 2" in failed.reason


@pytest.mark.parametrize(("forks", "reward", "reason"), [
    ((Fork(at=0, branch=0),), 1.0, None),
    ((Fork(at=0, branch=0),), None, "1 of 1 rewards failed"),
    ((), 1.0, "has 1 trajectories; at least 2"),
])  # fmt: skip
def test_a_group_that_branches_is_whole_though_its_one_conversation_is_over_before_it_does(
    forks: tuple[Fork, ...], reward: float | None, reason: str | None
) -> None:
    rules = GroupRules(vocabulary_size=100, min_group_size=2, filters=GroupFilter())
    alone = group(0, trajectory(0, reward=reward).model_copy(update={"forks": forks}))
    found = admissible(alone, rules=rules, belongs=lambda _: True)
    assert found is alone if reason is None else isinstance(found, FailedLease) and reason in found.reason


def test_a_branching_group_that_lost_conversations_before_their_first_turn_is_as_large_as_others() -> None:
    rules = GroupRules(vocabulary_size=100, min_group_size=2, filters=GroupFilter())
    one = trajectory(0, reward=1.0).model_copy(update={"forks": (Fork(at=0, branch=0),)})
    failed = admissible(group(0, one).model_copy(update={"turnless": 1}), rules=rules, belongs=lambda _: True)
    assert isinstance(failed, FailedLease)
    assert failed.reason == (
        "the group has 1 trajectories, and 1 of its conversations had no turn; at least 2 are needed"
    )
    assert not failed.data_fault
    enough = group(0, one, one).model_copy(update={"turnless": 1})
    assert admissible(enough, rules=rules, belongs=lambda _: True) is enough


def test_each_end_of_the_range_counts_by_itself() -> None:
    assert GroupFilter(min_mean_reward=0.5).reason(rewarded(5.0, 6.0)) is None
    assert GroupFilter(max_mean_reward=0.5).reason(rewarded(-5.0, -6.0)) is None


def test_more_than_the_allowed_rounds_on_the_way_to_one_batch_end_the_run() -> None:
    """2 rounds of 3 groups: the 7th is one too many."""
    rounds = FilterRounds(GroupFilter(drop_uniform=True, rounds=2), groups_per_step=3)
    out = [rounds.left_out(rewarded(0.0, 0.0), FilterReason.UNIFORM, buffered=1) for _ in range(7)]
    assert out[:6] == [None] * 6
    assert isinstance(out[6], RunAborted)


def test_a_batch_begins_the_count_anew() -> None:
    rounds = FilterRounds(GroupFilter(drop_uniform=True, rounds=1), groups_per_step=2)
    for _ in range(10):
        out = [rounds.left_out(rewarded(0.0, 0.0), FilterReason.UNIFORM, buffered=0) for _ in range(2)]
        assert out == [None, None]
        rounds.batch_taken()


def test_what_is_left_out_while_a_whole_batch_lies_ready_does_not_count() -> None:
    """The trainer is slow, not the tasks at fault: sampling ahead may meet any number of such groups."""
    rounds = FilterRounds(GroupFilter(drop_uniform=True, rounds=1), groups_per_step=2)
    out = [rounds.left_out(rewarded(0.0, 0.0), FilterReason.UNIFORM, buffered=2) for _ in range(100)]
    assert out == [None] * 100


def test_the_error_says_how_many_why_and_what_to_do() -> None:
    rules = GroupFilter(drop_uniform=True, min_mean_reward=0.1, max_mean_reward=0.9, rounds=1)
    rounds = FilterRounds(rules, groups_per_step=2)
    rounds.left_out(rewarded(0.5, 0.5), FilterReason.UNIFORM, buffered=1)
    rounds.left_out(rewarded(0.0, 0.0), FilterReason.TOO_HARD, buffered=1)
    failure = rounds.left_out(rewarded(0.0, 0.1), FilterReason.TOO_HARD, buffered=1)
    text = str(failure)
    assert "3 groups were filtered since the last batch, and 1 of 2 are there" in text
    assert "at most 2 may be (1 rounds of 2)" in text
    assert "with a mean reward under 0.1: 2, without spread of rewards: 1" in text
    assert "mean reward of these groups is 0.183" in text, "(0.5 + 0 + 0.05) / 3"
    assert "raise rollouts.group_size" in text
    assert "rollouts.filter_rounds" in text


# In the intake


async def test_what_is_left_out_is_told_by_reason_journaled_and_in_the_books(tmp_path: Path) -> None:
    filters = GroupFilter(drop_uniform=True, min_mean_reward=0.25, max_mean_reward=0.75)
    async with learner(tmp_path, filters=filters) as ours, ours.env("e") as env:
        await env.enter()
        await env.leases(4)
        for lease_id, reward in enumerate((0.5, 0.0, 1.0)):
            await env.finish(rewarded(reward, reward, lease_id=lease_id))
            assert [lease.lease_id for lease in await env.leases(1)] == [4 + lease_id], "its place is given back"
        await env.finish(rewarded(0.0, 1.0, lease_id=3))
        assert ours.left_out == {"uniform": 1, "mean_reward_low": 1, "mean_reward_high": 1}
        assert [record for record in ours.journal() if isinstance(record, LoggedFilter)] == [
            LoggedFilter(lease_id=0),
            LoggedFilter(lease_id=1),
            LoggedFilter(lease_id=2),
        ]
        books = ours.intake.books()
        assert (books.filtered, books.buffered) == (3, 1)


async def test_a_trainer_that_waits_for_groups_which_are_all_filtered_is_told_so(tmp_path: Path) -> None:
    """Batches of 2 groups and 1 round: the third filtered group ends the run."""
    filters = GroupFilter(drop_uniform=True, rounds=1)
    async with learner(tmp_path, filters=filters) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        waiting = asyncio.create_task(ours.intake.take())
        for lease_id in range(3):
            (lease,) = await env.leases(1)
            assert (lease.lease_id, waiting.done()) == (lease_id, False)
            await env.finish(rewarded(1.0, 1.0, lease_id=lease_id))
        with pytest.raises(RunAborted, match="3 groups were filtered since the last batch, and 0 of 2 are there"):
            async with asyncio.timeout(60):
                await waiting


async def test_a_batch_taken_in_between_lets_the_run_go_on(tmp_path: Path) -> None:
    filters = GroupFilter(drop_uniform=True, rounds=1)
    async with learner(tmp_path, filters=filters) as ours, ours.env("e") as env:
        await env.enter(capacity=1)
        for version in range(3):
            for lease_id in range(4 * version, 4 * version + 4):
                await env.leases(1)
                rewards = (0.0, float(lease_id % 2))  # every other group has a spread
                await env.finish(rewarded(*rewards, lease_id=lease_id, version=version))
            await ours.train()
        assert ours.intake.books().filtered == 6
