"""From groups to training sequences, and the bound on lag at their door."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from learner.algorithms.knobs import Aggregation
from learner.algorithms.policy_loss import once_for_each, token_weights
from learner.algorithms.preset import CarriedState
from learner.algorithms.presets.best_of_k import BestOfKConfig
from learner.algorithms.presets.dr_grpo import DrGrpoConfig
from learner.algorithms.presets.gdpo import GdpoConfig
from learner.algorithms.presets.gigpo import GigpoConfig
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.online_dpo import OnlineDpoConfig
from learner.algorithms.presets.rae import RaeConfig
from learner.algorithms.presets.treerl import TreerlConfig
from learner.leases.task_order import TaskOrder
from learner.training.batch import (
    ComponentMissing,
    GroupsAgain,
    LagBoundBroken,
    SeveralSequences,
    Teaching,
    flatten,
    sequences_of,
)
from learner.training.models import TokenScores, credit
from protocol.trajectories import SUMMARY_STATE, Fork, RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan
from tests.learner.samples import INCARNATION, group, trajectory

GRPO = GrpoConfig().preset()


def test_a_trajectory_becomes_a_sequence_with_its_reward_and_the_lag_of_each_sampled_token() -> None:
    first = group(0, trajectory(3, 3, reward=1.0), trajectory(2, 3, 4, reward=0.0))
    second = group(1, trajectory(4, reward=5.0), trajectory(4, reward=5.0, finish="length"))
    sequences = sequences_of([first, second], version=4, max_lag=2, preset=GRPO)
    assert [sequence.reward for sequence in sequences] == [1.0, 0.0, 5.0, 5.0]
    assert [sequence.group for sequence in sequences] == [0, 0, 1, 1]
    assert [sequence.pair for sequence in sequences] == [-1, -1, -1, -1]
    assert [sequence.truncated for sequence in sequences] == [False, False, False, True]
    assert [sequence.lags.tolist() for sequence in sequences] == [[0, 0, 1, 1], [0, 0, 2, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert [sequence.mixed_versions for sequence in sequences] == [False, True, False, False]
    assert sequences[0].loss_mask.tolist() == [False, False, True, True]
    assert np.array_equal(sequences[0].behavior_logprobs, first.trajectories[0].behavior_logprobs)


def test_tokens_that_saw_older_keys_and_values_are_of_mixed_versions_though_one_sampled_them() -> None:
    def cached(one: Trajectory) -> Trajectory:
        spans = tuple(span.model_copy(update={"cache": f"{INCARNATION}.1"}) for span in one.version_spans)
        return one.model_copy(update={"version_spans": spans})

    whole = sequences_of([group(0, cached(trajectory(4)), trajectory(4))], version=4, max_lag=3, preset=GRPO)
    assert [(each.mixed_versions, each.lags.max()) for each in whole] == [(True, 0), (False, 0)]
    parts = sequences_of([group(0, cached(several_turns(starts=(3, 6))))], version=4, max_lag=3, preset=GRPO)
    assert [each.mixed_versions for each in parts] == [True] * 3


def test_of_a_group_only_those_are_taken_that_the_algorithm_selects() -> None:
    rewards = (0.5, 2.0, -1.0, 2.0)
    groups = [group(number, *(trajectory(4, reward=reward) for reward in rewards)) for number in range(2)]
    pairs = sequences_of(groups, version=4, max_lag=0, preset=OnlineDpoConfig().preset())
    assert [(sequence.pair, sequence.reward) for sequence in pairs] == [(0, 2.0), (0, -1.0), (1, 2.0), (1, -1.0)]
    best = sequences_of(groups, version=4, max_lag=0, preset=BestOfKConfig().preset())
    assert [(sequence.pair, sequence.reward) for sequence in best] == [(-1, 2.0), (-1, 2.0)]


def rewarded(**components: float) -> Trajectory:
    made = trajectory(4)
    return made.model_copy(update={"reward": made.reward.model_copy(update={"components": components})})


def test_an_algorithm_has_the_reward_components_that_it_weighs_in_its_own_order() -> None:
    gdpo = GdpoConfig(components={"form": 0.5, "right": 1.0}).preset()
    groups = [group(0, rewarded(right=1.0, other=7.0, form=0.25), rewarded(form=0.0, right=0.0))]
    assert [s.components for s in sequences_of(groups, version=4, max_lag=0, preset=gdpo)] == [(0.25, 1.0), (0.0, 0.0)]
    assert [s.components for s in sequences_of(groups, version=4, max_lag=0, preset=GRPO)] == [(), ()]


@pytest.mark.parametrize(("given", "said"), [({}, "gave none"), ({"right": 1.0, "parsed": 0.0}, "gave parsed, right")])
def test_a_component_that_a_reward_lacks_is_named_with_those_that_it_has(given: dict[str, float], said: str) -> None:
    gdpo = GdpoConfig(components={"form": 0.5, "right": 1.0}).preset()
    with pytest.raises(ComponentMissing, match=f"environment .* has no form: verifier test {said}.*algo.components"):
        sequences_of([group(0, rewarded(**given))], version=4, max_lag=0, preset=gdpo)


def test_equal_prompts_are_equal_states() -> None:
    groups = [group(0, trajectory(4), trajectory(4)), group(1, trajectory(4))]
    states = [s.turns[0].state for s in sequences_of(groups, version=4, max_lag=0, preset=GRPO)]
    assert states[0] == states[1] == states[2]


def test_each_group_has_its_teacher_by_number() -> None:
    groups = [group(0, trajectory(4), trajectory(4)), group(1, trajectory(4))]
    taught = sequences_of(groups, version=4, max_lag=0, preset=GRPO, teaching=[Teaching(index=2), Teaching()])
    assert [sequence.teacher for sequence in taught] == [2, 2, 0]
    assert [len(sequence.teacher_logprobs) for sequence in taught] == [0, 0, 0]


def test_what_a_teacher_said_goes_with_the_trajectory_that_it_said_it_of() -> None:
    """Of the best and the worst of a group, the third and the first, the logprobs of the third and the first."""
    rewards = (0.0, 0.5, 1.0)
    said = [np.full(3, -float(number), dtype=np.float32) for number in range(3)]
    groups = [group(0, *(trajectory(4, reward=reward) for reward in rewards))]
    taught = sequences_of(
        groups, version=4, max_lag=0, preset=OnlineDpoConfig().preset(), teaching=[Teaching(logprobs=said)]
    )
    assert [sequence.teacher_logprobs.tolist() for sequence in taught] == [[-2.0] * 3, [0.0] * 3]
    assert [sequence.teacher for sequence in taught] == [0, 0]


def test_a_token_beyond_the_bound_is_never_let_through() -> None:
    with pytest.raises(LagBoundBroken, match="lags 0 to 3 at version 5; the bound is 0 to 2"):
        sequences_of([group(0, trajectory(2, 5, 5))], version=5, max_lag=2, preset=GRPO)


@pytest.mark.parametrize(("versions", "bound"), [((2, 2), 2), ((5, 1), 3)])
def test_groups_that_are_trained_again_have_a_bound_of_their_own_which_is_as_hard(
    versions: tuple[int, int], bound: int
) -> None:
    again = GroupsAgain(1, max_lag=3)
    assert len(sequences_of([group(0), group(1)], version=2, max_lag=2, preset=GRPO, again=again)) == 4
    groups = [group(0, trajectory(versions[0])), group(1, trajectory(versions[1]))]
    with pytest.raises(LagBoundBroken, match=f"at version 5; the bound is 0 to {bound}"):
        sequences_of(groups, version=5, max_lag=2, preset=GRPO, again=again)


def test_a_token_of_a_version_that_is_yet_to_come_is_never_let_through() -> None:
    with pytest.raises(LagBoundBroken, match="lags -1 to 0"):
        sequences_of([group(0, trajectory(5, 6))], version=5, max_lag=2, preset=GRPO)


def test_every_task_comes_once_an_epoch_in_another_order_and_the_same_after_a_restart() -> None:
    order, again = TaskOrder(count=10, seed=3), TaskOrder(count=10, seed=3)
    epochs = [[order.task_index(epoch * 10 + place) for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [again.task_index(lease_id) for lease_id in range(29, -1, -1)] == [
        task for epoch in reversed(epochs) for task in reversed(epoch)
    ]


def test_runs_of_different_seeds_go_through_their_tasks_in_different_orders() -> None:
    runs = [TaskOrder(count=10, seed=seed) for seed in range(3)]
    assert len({tuple(run.task_index(place) for place in range(10)) for run in runs}) == 3


def test_seeds_differ_by_lease_attempt_and_run() -> None:
    seeds = {
        TaskOrder(count=10, seed=seed).lease_seed(lease_id, attempt=attempt)
        for seed in range(3)
        for lease_id in range(3)
        for attempt in range(3)
    }
    assert len(seeds) == 27
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_turn_has_its_own_reward_where_the_algorithm_asks_for_it() -> None:
    gigpo = GigpoConfig(turn_rewards=True).preset()
    told = group(0, rewarded(turn_0=0.25, other=1.0))
    (asked,) = sequences_of([told], version=4, max_lag=0, preset=gigpo)
    assert [turn.reward for turn in asked.turns] == [0.25]
    (plain,) = sequences_of([told], version=4, max_lag=0, preset=GigpoConfig().preset())
    assert [turn.reward for turn in plain.turns] == [0.0]
    with pytest.raises(
        ComponentMissing, match=r"for 1 turns has no component turn_0: it has other\. Use an environment"
    ):
        sequences_of([group(0, rewarded(other=1.0))], version=4, max_lag=0, preset=gigpo)


def several_turns(
    *, starts: tuple[int, ...] = (), rewards: tuple[float | None, ...] = (None, None, None)
) -> Trajectory:
    """Three turns of two given and one sampled token each, as one sequence or with new ones at `starts`."""
    return Trajectory(
        token_ids=np.arange(1, 10, dtype=np.int32),
        loss_mask=np.array([0, 0, 1] * 3, dtype=np.uint8),
        behavior_logprobs=np.array([0, 0, -1, 0, 0, -2, 0, 0, -3], dtype=np.float32),
        version_spans=tuple(
            VersionSpan(version=f"{INCARNATION}.{2 + turn}", start=3 * turn + 2, end=3 * turn + 3) for turn in range(3)
        ),
        turns=tuple(
            Turn(
                start=3 * turn,
                completion_start=3 * turn + 2,
                end=3 * turn + 3,
                finish_reason="stop",
                generator_ids=("g",),
                reward=reward,
                state=("here", "there", "here")[turn],
            )
            for turn, reward in enumerate(rewards)
        ),
        reward=RewardRecord(reward=2.0, verifier="test"),
        sequence_starts=starts,
        stop_reason="solved",
    )


def test_a_trajectory_of_several_contexts_becomes_sequences_that_share_its_reward() -> None:
    groups = [group(0, several_turns(starts=(3, 6)), several_turns())]
    sequences = sequences_of(groups, version=4, max_lag=2, preset=GRPO)

    assert [len(sequence.token_ids) for sequence in sequences] == [3, 3, 3, 9]
    assert [sequence.continues for sequence in sequences] == [False, True, True, False]
    assert [sequence.reward for sequence in sequences] == [2.0] * 4
    assert [sequence.mixed_versions for sequence in sequences] == [False, False, False, True]
    assert [sequence.token_ids.tolist() for sequence in sequences[:3]] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [[turn.start for turn in sequence.turns] for sequence in sequences] == [[0], [0], [0], [0, 3, 6]]
    batch = flatten(sequences)
    assert (batch.trajectories.tolist(), batch.firsts.tolist()) == ([0, 0, 0, 1], [0, 3])
    assert sum(int(sequence.loss_mask.sum()) for sequence in sequences) == 6


def test_a_trajectory_of_several_contexts_without_a_token_to_train_stays_with_its_reward() -> None:
    """As one is whose tokens are all too old: the others of its group are compared with it."""
    old, young = several_turns(starts=(3, 6)), several_turns(starts=(3, 6))
    old = old.model_copy(update={"loss_mask": np.zeros_like(old.loss_mask)})
    sequences = sequences_of([group(0, old, young)], version=4, max_lag=3, preset=GRPO)
    assert [one.loss_mask.any() for one in sequences] == [False, *[True] * (len(sequences) - 1)]
    assert [one.continues for one in sequences][:2] == [False, False]


def in_a_tree(*ways: tuple[int, ...], rewards: tuple[float, ...]) -> TrajectoryGroup:
    """Three turns each, forked at the opening and behind the first turn; what is sampled behind a fork differs."""
    members = []
    for number, (way, reward) in enumerate(zip(ways, rewards, strict=True)):
        one = several_turns()
        forks = tuple(Fork(at=3 * depth, branch=branch) for depth, branch in enumerate(way))
        tokens = one.token_ids.copy()
        tokens[2] += 20 * way[0]
        tokens[5:] += 100 * number
        members.append(one.model_copy(update={"forks": forks, "token_ids": tokens, "reward": told(reward)}))
    return group(0, *members)


def test_turns_before_a_fork_are_of_one_branch_in_all_trajectories_that_share_them() -> None:
    tree = in_a_tree((0, 0), (0, 1), (1, 0), (1,), rewards=(1.0, 0.0, 1.0, 1.0))
    sequences = sequences_of([tree, tree], version=4, max_lag=2, preset=GRPO)
    ways = [[turn.branch for turn in sequence.turns] for sequence in sequences]
    assert all(second == third for _, second, third in ways[:3]), "nothing forks behind the second turn"
    assert ways[0][0] == ways[1][0] != ways[0][1] != ways[1][1]
    assert ways[2][0] == ways[3][0] == ways[3][1] == ways[3][2] != ways[2][1]
    assert not {each for way in ways[:4] for each in way} & {each for way in ways[4:] for each in way}, "another group"
    assert [sequence.lags[2] for sequence in sequences[:4]] == [2] * 4, "a beginning is as old in each of its branches"


def test_the_tree_of_a_group_reaches_the_advantages_of_its_tokens() -> None:
    # As in the docs: beginnings of 1, 0 and of 1, 1; of the others of a group that does not branch, 2 and 0.
    tree = in_a_tree((0, 0), (0, 1), (1, 0), (1, 1), rewards=(1.0, 0.0, 1.0, 1.0))
    plain = group(1, *(several_turns().model_copy(update={"reward": told(reward)}) for reward in (2.0, 0.0)))
    preset = TreerlConfig(leaf_power=0.0).preset()
    batch = flatten(sequences_of([tree, plain], version=4, max_lag=2, preset=preset))
    made = credit(batch, TokenScores(), preset=preset, carried=CarriedState())
    found = made.advantages[torch.from_numpy(batch.loss_mask)].reshape(6, 3).tolist()
    assert found == [
        [-0.5, 0.75, 0.75],
        [-0.5, -1.25, -1.25],
        [0.5, 0.25, 0.25],
        [0.5, 0.25, 0.25],
        [2.0, 2.0, 2.0],
        [-2.0, -2.0, -2.0],
    ]


def told(reward: float) -> RewardRecord:
    return RewardRecord(reward=reward, verifier="test")


@pytest.mark.parametrize("aggregation", ["token", "sequence_mean", "sequence_sum", "constant"])
def test_a_trajectory_counts_once_in_every_mean_however_many_sequences_it_is(aggregation: Aggregation) -> None:
    def weigh(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        return token_weights(trained_lengths=lengths, aggregation=aggregation, constant_length=7)

    whole = once_for_each(weigh, trained_lengths=np.array([5, 3]), trajectories=np.array([0, 1]))
    split = once_for_each(weigh, trained_lengths=np.array([2, 2, 1, 3]), trajectories=np.array([0, 0, 0, 1]))

    assert split.tolist() == [whole[0]] * 3 + [whole[1]]


def test_equal_keys_are_equal_states_whatever_the_tokens() -> None:
    (sequence,) = sequences_of([group(0, several_turns())], version=4, max_lag=2, preset=GRPO)

    states = [turn.state for turn in sequence.turns]
    assert states[0] == states[2] != states[1]


def test_turns_have_the_rewards_that_the_environment_gave_them() -> None:
    gigpo = GigpoConfig(turn_rewards=True).preset()
    (sequence,) = sequences_of([group(0, several_turns(rewards=(0.5, 0.0, 1.5)))], version=4, max_lag=2, preset=gigpo)
    assert [turn.reward for turn in sequence.turns] == [0.5, 0.0, 1.5]

    with pytest.raises(ComponentMissing, match="have no rewards"):
        sequences_of([group(0, several_turns(rewards=(0.5, None, 1.5)))], version=4, max_lag=2, preset=gigpo)


def test_a_summary_has_no_number_among_the_turns_that_a_verifier_rewards() -> None:
    gigpo = GigpoConfig(turn_rewards=True).preset()
    given = several_turns(rewards=(None, None, None))
    summary = given.turns[1].model_copy(update={"state": SUMMARY_STATE})
    told = RewardRecord(reward=3.0, verifier="test", components={"turn_0": 1.0, "turn_1": 2.0})
    given = given.model_copy(update={"turns": (given.turns[0], summary, given.turns[2]), "reward": told})

    (sequence,) = sequences_of([group(0, given)], version=4, max_lag=2, preset=gigpo)

    assert [turn.reward for turn in sequence.turns] == [1.0, 0.0, 2.0]


def test_gigpo_is_the_same_for_one_sequence_and_for_several() -> None:
    gigpo = GigpoConfig(turn_rewards=True).preset()
    other = several_turns(rewards=(0.0, 0.0, 0.0)).model_copy(
        update={"reward": RewardRecord(reward=0.0, verifier="test")}
    )
    rewards = (0.5, 0.0, 1.5)

    def advantages(starts: tuple[int, ...]) -> list[float]:
        groups = [group(0, several_turns(starts=starts, rewards=rewards), other)]
        batch = flatten(sequences_of(groups, version=4, max_lag=2, preset=gigpo))
        made = credit(batch, TokenScores(), preset=gigpo, carried=CarriedState())
        return made.advantages.tolist()

    assert advantages(()) == advantages((3, 6))
    assert any(advantages(()))


def test_a_pair_of_trajectories_of_several_sequences_is_refused() -> None:
    groups = [group(0, several_turns(starts=(3,)), trajectory(4, reward=0.0))]
    with pytest.raises(SeveralSequences, match='history = "append"'):
        sequences_of(groups, version=4, max_lag=2, preset=OnlineDpoConfig().preset())


def played(player: str, reward: float) -> Trajectory:
    return trajectory(4, reward=reward).model_copy(update={"player": player})


ZERO_SUM = group(0, played("x", 1.0), played("o", -1.0), played("x", -1.0), played("o", 1.0), played("x", 1.0))


def test_players_are_compared_with_those_who_played_the_same_part() -> None:
    sequences = sequences_of([group(0), ZERO_SUM], version=4, max_lag=4, preset=GRPO)
    assert [(sequence.group, sequence.reward) for sequence in sequences] == [
        (0, 1.0), (0, 0.0), (1, 1.0), (1, -1.0), (1, 1.0), (2, -1.0), (2, 1.0),
    ]  # fmt: skip

    plain = DrGrpoConfig().preset()
    made = credit(
        flatten(sequences_of([ZERO_SUM], version=4, max_lag=0, preset=plain)),
        TokenScores(), preset=plain, carried=CarriedState(),
    )  # fmt: skip
    # x: 1, -1 and 1 have a mean of 1/3; o: -1 and 1 have one of 0. As one group their mean would be 1/5.
    assert made.advantages[made.kept].tolist() == pytest.approx([2 / 3, -4 / 3, 2 / 3, -1.0, 1.0])


def test_a_role_is_a_player_of_an_environment_in_every_group_and_step() -> None:
    def roles(*groups: TrajectoryGroup) -> list[int]:
        return [one.role for one in sequences_of(groups, version=4, max_lag=4, preset=GRPO)]

    x, o = roles(ZERO_SUM)[0], roles(ZERO_SUM)[-1]
    assert roles(group(1, played("o", 0.0), played("x", 1.0), played("o", 1.0)), ZERO_SUM) == [o, o, x, x, x, x, o, o]
    alone = roles(group(2))
    assert len({x, o, *alone}) == 3
    elsewhere = ZERO_SUM.model_copy(update={"environment": "elsewhere"})
    assert not {x, o} & set(roles(elsewhere))


def test_each_player_has_a_baseline_of_its_own_from_step_to_step() -> None:
    """x got 1, -1 and 1, o -1 and 1. With nothing left of what was before the baselines are 1/3 and 0."""
    preset = RaeConfig(baseline_decay=0.0).preset()
    batch = flatten(sequences_of([ZERO_SUM], version=4, max_lag=0, preset=preset))
    first = credit(batch, TokenScores(), preset=preset, carried=CarriedState())
    assert first.advantages[first.kept].tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]
    second = credit(batch, TokenScores(), preset=preset, carried=first.carried)
    assert second.advantages[second.kept].tolist() == pytest.approx([2 / 3, -4 / 3, 2 / 3, -1.0, 1.0])


def test_a_batch_holds_no_token_that_is_too_old_whoever_played_it() -> None:
    old = trajectory(1, reward=0.0).model_copy(update={"player": "o"})
    given = group(0, played("x", 1.0), old)
    assert given.oldest_version == 1
    with pytest.raises(LagBoundBroken):
        sequences_of([given], version=4, max_lag=2, preset=GRPO)


def test_of_each_player_the_best_and_the_worst_make_a_pair_of_their_own() -> None:
    preset = OnlineDpoConfig().preset()
    even = group(1, played("x", 0.0), played("o", 1.0), played("x", 0.0), played("o", 0.5))
    pairs = sequences_of([ZERO_SUM, even], version=4, max_lag=0, preset=preset)
    assert [(sequence.pair, sequence.reward) for sequence in pairs] == [
        (0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0), (2, 1.0), (2, 0.5),
    ]  # fmt: skip
