"""Advantages and their shaping against the numbers of their authors' code, or of the best known implementation.

    group, leave_one_out, length_weighted,     verl-project/verl at 1dda039b, verl/trainer/ppo/core_algos.py:
    batch, gae, optimal_token                  compute_{grpo,rloo,opo,reinforce_plus_plus,
                                               reinforce_plus_plus_baseline}_outcome_advantage,
                                               compute_gae_advantage_return, compute_optimal_token_baseline_advantage
    group by its mean                          tajwarfahim/maxrl at c0698ebb, the same file
    pass_at_k                                  RUCAIBox/Passk_Training at c3ba575e, code/passk_adv.py
    per_component                              NVlabs/GDPO at b080e63d,
                                               trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py
    least_variance, effective_share            mit-han-lab/vcpo at c7f030f0, recipe/fully_async_policy/
                                               staleness_utils.py: compute_opob_baseline, compute_ess_info
    by_role                                    spiral-rl/spiral at a02d0ed8, spiral/utils.py: EMA
    by_history                                 langfengQ/verl-agent, recipe/hgpo/core_hgpo.py, as in OliverLeeXZ/SERL at
                                               5a2a85b1, mode mean_norm
    step_group                                 langfengQ/verl-agent, gigpo/core_gigpo.py, as in ymguan/verl-agent at
                                               0a100835, means over trajectories
    by_branch                                  THUDM/TreeRL at f0edbea6, openrlhf/trainer/ppo_utils/tree_node.py:
                                               leaf_normalize, and parallel_mcts.py: path_from_root_to_node; without the
                                               weights of leaves, times (n - 1) / n, since rewards there are less the
                                               mean of the other leaves'
    adapted_beta                               verl-project/verl, as above: AdaptiveKLController
    entropy_weight                             SkyworkAI/Skywork-OR1 at 64e96afa, verl/trainer/ppo/core_algos.py:
                                               EntController

Where verl standardises it takes the unbiased deviation, here it is the population's: its numbers are given times
sqrt(n / (n - 1)), n the tokens. So are GDPO's, n its trajectories. Epsilons differ, and explain what is left.
"""

import pytest
import torch

from learner.algorithms import advantages, shaping
from learner.algorithms.branches import by_branch
from learner.algorithms.histories import by_history
from learner.algorithms.ratios import effective_share
from learner.algorithms.role_baselines import by_role
from learner.algorithms.token_baseline import optimal_token
from tests.learner.algorithms.differences import doubles

REWARDS = doubles(1.0, 0.2, -0.5, 0.0, 1.0, 0.4)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
LENGTHS = torch.tensor([3, 1, 2, 4, 2, 3])
SEQUENCES = torch.repeat_interleave(torch.arange(6), LENGTHS)
TOKENS = len(SEQUENCES)
PENALTIES = -0.5 * doubles(0.01, -0.02, 0.03, 0.0, 0.05, -0.01, 0.02, 0.02, -0.03, 0.01, 0.04, -0.02, 0.01, 0.0, 0.03)
VALUES = doubles(0.3, 0.1, 0.5, -0.2, 0.4, 0.0, 0.6, -0.1, 0.2, 0.3, 0.1, 0.9, -0.4, 0.2, 0.7)
STATES = torch.tensor([0, 1, 2, 0, 1, 3, 0, 2, 1, 1, 2])
"""States of the turns of four trajectories of one group: abc, abd, ac, bbc."""
OWNERS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
RETURNS = doubles(0.9, 0.95, 1.0, 0.0, 0.1, 0.2, 0.5, 0.6, 0.3, 0.2, 0.7)


def turn_rewards(discount: float) -> torch.Tensor:
    """Rewards of the turns that have RETURNS."""
    following = torch.where(advantages.has_next(OWNERS), RETURNS.roll(-1), 0.0)
    return RETURNS - discount * following


def in_trajectories(rewards: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.float64).index_add(0, OWNERS, rewards)


def near(*numbers: float, within: float = 1e-8) -> object:
    return pytest.approx(list(numbers), abs=within)


def test_a_group_by_its_deviation_and_by_nothing() -> None:
    made = advantages.group(rewards=REWARDS, groups=GROUPS, scale="std")
    assert made.tolist() == near(1.0214644999, -0.0444115, -0.9770529999, -0.9271708078, 1.0596237804, -0.1324529725)
    made = advantages.group(rewards=REWARDS, groups=GROUPS, scale="none")
    assert made.tolist() == near(0.7666666667, -0.0333333333, -0.7333333333, -0.4666666667, 0.5333333333, -0.0666666667)


def test_a_group_by_its_mean() -> None:
    made = advantages.group(rewards=doubles(1, 0, 0, 1, 1, 0), groups=GROUPS, scale="mean")
    assert made.tolist() == near(1.999994, -0.999997, -0.999997, 0.49999925, 0.49999925, -0.9999985)


def test_a_group_less_the_mean_of_the_others_and_less_the_mean_by_tokens() -> None:
    made = advantages.leave_one_out(rewards=REWARDS, groups=GROUPS)
    assert made.tolist() == near(1.15, -0.05, -1.1, -0.7, 0.8, -0.1)
    made = advantages.length_weighted(rewards=REWARDS, groups=GROUPS, lengths=LENGTHS)
    assert made.tolist() == near(0.6333333333, -0.1666666667, -0.8666666667, -0.3555555556, 0.6444444444, 0.0444444444)


def test_rewards_to_go_over_the_batch() -> None:
    made = advantages.batch(
        rewards=REWARDS, groups=GROUPS, sequences=SEQUENCES, subtract_group_mean=False, token_rewards=PENALTIES
    )
    assert made.tolist() == near(
        *(1.2230956004, 1.2327010633, 1.2134901376, -0.2945675262, -1.6777541733, -1.6297268592, -0.697996965),
        *(-0.6787860393, -0.6595751137, -0.6883915021, 1.2230956004, 1.2615174517, 0.0512291355),
        *(0.0608345984, 0.0608345984),
        within=1e-5,
    )
    made = advantages.batch(rewards=REWARDS, groups=GROUPS, sequences=SEQUENCES, subtract_group_mean=True)
    assert made.tolist() == near(
        *[1.4584039674] * 3, -0.0373949735, *[-1.3462190469] * 2, *[-0.8476193999] * 4, *[1.0221292763] * 2,
        *[-0.0997199294] * 3,
        within=1e-5,
    )  # fmt: skip


def test_generalised_advantages() -> None:
    ends = torch.where(advantages.has_next(SEQUENCES), 0.0, REWARDS[SEQUENCES])
    made = advantages.gae(
        rewards=ends + PENALTIES, values=VALUES, sequences=SEQUENCES, gamma=0.98, policy_lambda=0.9, value_lambda=0.9,
        whiten=True,
    )  # fmt: skip
    assert made.returns.tolist() == near(
        *(0.82309314, 0.92777, 0.985, 0.2, -0.46159, -0.495, 0.0197763808, 0.04487118, 0.03999, -0.005, 0.95902),
        *(1.01, 0.37460594, 0.40817, 0.385),
    )
    assert made.advantages.tolist() == near(
        *(0.791019632, 1.3712250984, 0.7184776999, 0.5566095993, -1.8458748376, -1.1477662844, -1.31006023),
        *(0.0707599814, -0.5098345779, -0.7859434711, 1.4307354295, 0.0043537264, 1.2699831523, 0.191301861),
        -0.804986777,
        within=1e-5,
    )


def test_the_optimal_baseline_of_each_place() -> None:
    """Without `handle_zero_tail`, where the tail of the longest is compared with itself."""
    logprobs = -doubles(0.1, 1.2, 0.7, 2.3, 0.4, 1.6, 0.05, 3.1, 0.9, 0.3, 0.2, 1.1, 0.6, 0.8, 0.45)
    squares = torch.exp(2 * logprobs) + torch.linspace(0.01, 0.05, TOKENS, dtype=torch.float64)
    weights = doubles(1.0, 0.9, 1.0, 0.5, 1.0, 0.8, 1.0, 1.0, 0.7, 1.0, 0.6, 1.0, 1.0, 0.95, 1.0)
    made = optimal_token(
        rewards=REWARDS,
        groups=GROUPS,
        sequences=SEQUENCES,
        norms=weights.square() * (1 - 2 * torch.exp(logprobs) + squares),
        token_rewards=PENALTIES,
    )
    assert made.tolist() == near(
        *(1.0107480034, 0.8427025318, 0.0, 0.2207480034, -0.4992519966, -0.6472974682, -0.4037669386, -0.3586872504),
        *(-0.1466916751, 0.0, 0.5962330614, 0.6513127496, -0.0137669386, 0.0263127496, 0.2283083249),
        within=1e-7,
    )


@pytest.mark.parametrize(
    ("right", "k", "good", "bad"),
    [(2, 3, 0.7453544369, -0.248451479), (1, 2, 0.999998, -0.3333326667), (0, 2, 0.0, 0.0)],
)
def test_sets_of_answers(right: int, k: int, good: float, bad: float) -> None:
    answers = 8 if right == 2 else 4
    made = advantages.pass_at_k(
        right=torch.arange(answers) < right, groups=torch.zeros(answers, dtype=torch.int64), k=k
    )
    assert made.tolist() == near(*[good] * right, *[bad] * (answers - right), within=3e-6)


def test_components_one_by_one() -> None:
    made = advantages.per_component(
        components=torch.stack([REWARDS, doubles(0, 1, 1, 0, 0, 1)], dim=1), groups=GROUPS, weights=(1.0, 0.5)
    )
    assert made.tolist() == near(
        *(0.6279100385, 0.3453162703, -0.9732263088, -1.718827368, 1.0898655373, 0.6289618307), within=5e-4
    )


def test_the_baseline_of_least_variance_and_the_effective_share() -> None:
    ratios = torch.log(doubles(1.2, 0.4, 2.5, 0.9, 1.1, 0.3))
    made = advantages.least_variance(
        rewards=REWARDS, groups=GROUPS, log_ratios=ratios, norms=doubles(3, 1, 2, 5, 2, 4), scale="none"
    )
    assert made.tolist() == near(1.1117785629, 0.3117785629, -0.3882214371, -0.3754026349, 0.6245973651, 0.0245973651)
    assert effective_share(ratios) == pytest.approx(0.6854082999)


def test_baselines_of_two_players_after_eight_games() -> None:
    baselines: dict[int, float] = {}
    for _ in range(2):
        made = by_role(rewards=doubles(1, -1, 1, -1), roles=torch.tensor([0, 1, 0, 1]), baselines=baselines, decay=0.95)
        baselines = dict(made.baselines)
    assert baselines == pytest.approx({0: 0.18549375, 1: -0.18549375})


def test_turns_by_their_histories() -> None:
    earned = turn_rewards(1.0)
    made = by_history(
        rewards=in_trajectories(earned), groups=torch.zeros(4, dtype=torch.int64), sequences=OWNERS,
        turns=torch.arange(11), turn_states=STATES, gamma_step=1.0, history=2, power=1.0, scale="none",
        turn_rewards=earned,
    )  # fmt: skip
    assert made.tolist() == near(
        *(0.4333330989, 0.4799998999, 0.1833332926, -0.46666646, -0.3699999154, 0.0, 0.0333333164, -0.1666665524),
        *(-0.0874999315, -0.1874998957, -0.1166666597),
        within=1e-6,
    )


def test_turns_by_their_states() -> None:
    earned = turn_rewards(0.95)
    made = advantages.step_group(
        rewards=in_trajectories(earned), groups=torch.zeros(4, dtype=torch.int64), sequences=OWNERS,
        turns=torch.arange(11), turn_states=STATES, gamma_step=0.95, omega=1.0, scale="std", turn_rewards=earned,
    )  # fmt: skip
    assert made.tolist() == near(
        *(2.2427503745, 2.7474217198, 2.4026565454, -2.1490217623, -1.8632277876, -1.114114278, 0.2156629041),
        *(-0.6588959819, -0.5373825845, -0.7979438052, -0.6296462855),
    )


def test_parts_of_a_tree() -> None:
    made = by_branch(
        rewards=doubles(1, 0, 1, 1), groups=torch.zeros(4, dtype=torch.int64), turns=torch.arange(8),
        sequences=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), turn_branches=torch.tensor([0, 1, 0, 2, 3, 4, 3, 5]),
        scale="none", whole_tree=1.0, leaf_power=0.0,
    )  # fmt: skip
    theirs = doubles(-0.66666667, 1.0, -0.66666667, -1.66666667, 0.66666667, 0.33333333, 0.66666667, 0.33333333)
    assert made.tolist() == near(*(theirs * 3 / 4).tolist())


def test_a_weight_of_the_divergence_that_follows_a_target() -> None:
    beta = 0.1
    for measured, expected in ((3.0, 0.096), (6.6, 0.09792), (20.0, 0.1018368)):
        beta = shaping.adapted_beta(beta=beta, measured_kl=measured, target=6.0, horizon=100, trajectories=20)
        assert beta == pytest.approx(expected, rel=1e-9)


def test_a_weight_of_the_entropy_that_follows_a_target() -> None:
    weight = 1e-3
    for measured, expected in ((0.1, 15e-4), (0.15, 2e-3), (0.3, 15e-4), (0.25, 1e-3), (0.1, 15e-4), (0.05, 2e-3)):
        weight = shaping.entropy_weight(weight=weight, measured=measured, target=0.2, step=5e-4, limit=5e-3).following
        assert weight == pytest.approx(expected)
