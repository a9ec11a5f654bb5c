"""The policy losses other than `clip`: numbers by hand, and what all of them have in common."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.algorithms import policy_loss
from learner.algorithms.policy_loss import GammaWeight, PolicyLoss
from learner.algorithms.ratios import binary_kl
from tests.learner.algorithms.differences import central_differences, doubles, gradient, logs


@dataclass(frozen=True)
class Tokens:
    policy: Tensor
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    sequences: Tensor
    count: int


def plain_clip(tokens: Tokens, dual_clip: float | None = None) -> PolicyLoss:
    return policy_loss.clip(
        policy_logprobs=tokens.policy,
        proximal_logprobs=tokens.proximal,
        advantages=tokens.advantages,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )


def sequence_clip(tokens: Tokens, clip_low: float = 0.2, clip_high: float = 0.2, product: bool = False) -> PolicyLoss:
    return policy_loss.sequence_clip(
        policy_logprobs=tokens.policy,
        proximal_logprobs=tokens.proximal,
        advantages=tokens.advantages,
        sequences=tokens.sequences,
        count=tokens.count,
        clip_low=clip_low,
        clip_high=clip_high,
        product=product,
    )


def gmpo(tokens: Tokens, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    return policy_loss.gmpo(
        policy_logprobs=tokens.policy,
        proximal_logprobs=tokens.proximal,
        advantages=tokens.advantages,
        sequences=tokens.sequences,
        count=tokens.count,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def sapo(tokens: Tokens) -> PolicyLoss:
    return policy_loss.sapo(
        policy_logprobs=tokens.policy,
        proximal_logprobs=tokens.proximal,
        advantages=tokens.advantages,
        temperature_positive=1.0,
        temperature_negative=2.0,
    )


def cispo(tokens: Tokens, clip_low: float = 1.0) -> PolicyLoss:
    return policy_loss.cispo(
        policy_logprobs=tokens.policy,
        behavior_logprobs=tokens.behavior,
        advantages=tokens.advantages,
        clip_low=clip_low,
        clip_high=0.28,
    )


def reinforce(tokens: Tokens, cap: float | None = 1.0, bad_cap: float | None = None) -> PolicyLoss:
    return policy_loss.reinforce(
        policy_logprobs=tokens.policy,
        behavior_logprobs=tokens.behavior,
        advantages=tokens.advantages,
        cap=cap,
        bad_cap=bad_cap,
    )


def topr(tokens: Tokens, positive_weight: float = 1.0, negative_weight: float = 1.0) -> PolicyLoss:
    return policy_loss.topr(
        policy_logprobs=tokens.policy,
        behavior_logprobs=tokens.behavior,
        advantages=tokens.advantages,
        positive_weight=positive_weight,
        negative_weight=negative_weight,
    )


def kimi(tokens: Tokens, tau: float = 0.1) -> PolicyLoss:
    return policy_loss.kimi(
        policy_logprobs=tokens.policy, proximal_logprobs=tokens.proximal, advantages=tokens.advantages, tau=tau
    )


def dro(tokens: Tokens, beta: float = 0.05) -> PolicyLoss:
    return policy_loss.dro(
        policy_logprobs=tokens.policy, behavior_logprobs=tokens.behavior, advantages=tokens.advantages, beta=beta
    )


def dppo(tokens: Tokens, kappa: float = 1e-3, kl_limit: float | None = None) -> PolicyLoss:
    return policy_loss.dppo(
        policy_logprobs=tokens.policy,
        behavior_logprobs=tokens.behavior,
        advantages=tokens.advantages,
        delta_low=0.2,
        delta_high=0.2,
        kappa=kappa,
        kl_limit=kl_limit,
    )


def vespo(tokens: Tokens) -> PolicyLoss:
    return policy_loss.vespo(
        policy_logprobs=tokens.policy,
        behavior_logprobs=tokens.behavior,
        advantages=tokens.advantages,
        sequences=tokens.sequences,
        count=tokens.count,
        positive=GammaWeight(power=2.0, rate=3.0),
        negative=GammaWeight(power=3.0, rate=2.0),
    )


def likelihood_gain(tokens: Tokens) -> PolicyLoss:
    return policy_loss.likelihood_gain(policy_logprobs=tokens.policy, advantages=tokens.advantages)


LOSSES: dict[str, Callable[[Tokens], PolicyLoss]] = {
    "clip": plain_clip,
    "dual_clip": partial(plain_clip, dual_clip=3.0),
    "sequence_clip": sequence_clip,
    "product_clip": partial(sequence_clip, product=True),
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "reinforce": reinforce,
    "uncapped": partial(reinforce, cap=None),
    "topr": topr,
    "kimi": kimi,
    "dro": dro,
    "dppo": dppo,
    "dppo_kl": partial(dppo, kl_limit=0.05),
    "vespo": vespo,
    "likelihood_gain": likelihood_gain,
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def one_token(policy: float, anchor: float, advantage: float) -> Tokens:
    """A token with probability `policy` now and `anchor` under both the proximal and the behavior policy."""
    return Tokens(logs(policy), logs(anchor), logs(anchor), doubles(advantage), torch.tensor([0]), 1)


def random_tokens(seed: int, count: int = 4) -> Tokens:
    """`count` trajectories of 1, 2, 3, ... tokens, the policy moved from proximal and behavior by about a tenth."""
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.repeat_interleave(torch.arange(count), torch.arange(1, count + 1))

    def normal() -> Tensor:
        return torch.randn(len(sequences), generator=generator, dtype=torch.float64)

    behavior = -normal().abs() - 0.5
    proximal = behavior + 0.1 * normal()
    return Tokens(proximal + 0.1 * normal(), proximal, behavior, normal(), sequences, count)


def moved_to(tokens: Tokens, policy: Tensor) -> Tokens:
    return Tokens(policy, tokens.proximal, tokens.behavior, tokens.advantages, tokens.sequences, tokens.count)


def policy_gradient(loss: Callable[[Tokens], PolicyLoss], tokens: Tokens) -> Tensor:
    return gradient(lambda policy: loss(moved_to(tokens, policy)).losses.sum(), tokens.policy)


def flags(loss: PolicyLoss) -> list[bool]:
    assert loss.clipped is not None
    return [bool(flag) for flag in loss.clipped]


def test_the_sequence_ratio_is_the_geometric_mean_of_a_trajectorys_ratios() -> None:
    # Trajectory 0: ratios 1 and 1.21, geometric mean 1.1. Trajectory 1: ratio 0.5.
    tokens = Tokens(
        policy=logs(0.3, 0.121, 0.2),
        proximal=logs(0.3, 0.1, 0.4),
        behavior=logs(0.3, 0.1, 0.4),
        advantages=doubles(2, 2, -1),
        sequences=torch.tensor([0, 0, 1]),
        count=2,
    )
    wide = sequence_clip(tokens)
    # 1.1 is within 0.2: -1.1 x 2 on each of its tokens. 0.5 is not: pushing down stops at 0.8, and -0.8 x -1 = 0.8.
    assert wide.losses.tolist() == pytest.approx([-2.2, -2.2, 0.8])
    assert flags(wide) == [False, False, True]
    narrow = sequence_clip(tokens, clip_high=0.05)
    assert narrow.losses.tolist() == pytest.approx([-2.1, -2.1, 0.8])
    assert flags(narrow) == [True, True, True]


def test_with_advantages_that_differ_by_token_each_token_gets_the_sequence_ratio_times_its_own_advantage() -> None:
    tokens = Tokens(
        policy=logs(0.3, 0.121),
        proximal=logs(0.3, 0.1),
        behavior=logs(0.3, 0.1),
        advantages=doubles(2, -3),
        sequences=torch.tensor([0, 0]),
        count=1,
    )
    # s = sqrt(1 x 1.21) = 1.1; d/dlp of -s A is -1.1 x 2 and -1.1 x -3.
    assert policy_gradient(sequence_clip, tokens).tolist() == pytest.approx([-2.2, 3.3])


@pytest.mark.parametrize("seed", range(5))
def test_the_sequence_clip_has_the_gradient_of_its_objective_over_trajectories(seed: int) -> None:
    tokens = random_tokens(seed)
    lengths = torch.arange(1, tokens.count + 1, dtype=torch.float64)
    per_sequence = torch.randn(tokens.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def objective(policy: Tensor) -> Tensor:
        total = doubles(0.0)[0]
        for number in range(tokens.count):
            mine = tokens.sequences == number
            ratio = torch.exp((policy[mine] - tokens.proximal[mine]).mean())
            total = total - torch.minimum(ratio * per_sequence[number], ratio.clamp(0.95, 1.05) * per_sequence[number])
        return total

    def ours(policy: Tensor) -> Tensor:
        losses = policy_loss.sequence_clip(
            policy_logprobs=policy,
            proximal_logprobs=tokens.proximal,
            advantages=per_sequence[tokens.sequences],
            sequences=tokens.sequences,
            count=tokens.count,
            clip_low=0.05,
            clip_high=0.05,
        ).losses
        return (losses / lengths[tokens.sequences]).sum()

    torch.testing.assert_close(ours(tokens.policy), objective(tokens.policy))
    torch.testing.assert_close(gradient(ours, tokens.policy), central_differences(objective, tokens.policy))


def test_the_product_of_a_trajectorys_ratios_is_clipped_where_their_mean_is_not() -> None:
    """Ten tokens of ratio 1.05: the mean is within 0.2 of 1, the product, 1.05^10 = 1.63, is not. With five of 1.02 it
    is 1.02^5 = 1.104, and each token's gradient is that times the advantage.
    """
    proximal = logs(*[0.2] * 15)
    far, near = math.log(1.05), math.log(1.02)
    tokens = Tokens(
        policy=proximal + doubles(*[far] * 10, *[near] * 5),
        proximal=proximal,
        behavior=proximal,
        advantages=doubles(*[1.0] * 10, *[2.0] * 5),
        sequences=torch.tensor([0] * 10 + [1] * 5),
        count=2,
    )
    whole = partial(sequence_clip, product=True)
    assert flags(whole(tokens)) == [True] * 10 + [False] * 5
    assert flags(sequence_clip(tokens)) == [False] * 15
    assert whole(tokens).losses.tolist() == pytest.approx([-1.2] * 10 + [-2 * 1.02**5] * 5)
    assert policy_gradient(whole, tokens).tolist() == pytest.approx([0.0] * 10 + [-2 * 1.02**5] * 5)


@pytest.mark.parametrize("seed", range(3))
def test_summed_over_tokens_the_product_clip_has_the_gradient_of_its_objective_over_trajectories(seed: int) -> None:
    tokens = random_tokens(seed)
    per_sequence = torch.randn(tokens.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = Tokens(
        tokens.policy,
        tokens.proximal,
        tokens.behavior,
        per_sequence[tokens.sequences],
        tokens.sequences,
        tokens.count,
    )

    def objective(policy: Tensor) -> Tensor:
        gaps = torch.zeros(tokens.count, dtype=torch.float64).index_add(0, tokens.sequences, policy - tokens.proximal)
        ratio = torch.exp(gaps)
        return -torch.minimum(ratio * per_sequence, ratio.clamp(0.9, 1.1) * per_sequence).sum()

    narrow = partial(sequence_clip, clip_low=0.1, clip_high=0.1, product=True)
    torch.testing.assert_close(policy_gradient(narrow, whole), central_differences(objective, tokens.policy))


def test_gmpo_clips_each_ratio_before_it_takes_their_geometric_mean() -> None:
    """Trajectory 0, A = 2: log ratios 0.6, cut to 0.4, and -0.8, which may fall: mean -0.2. Trajectory 1, A = -1: log
    ratios -0.6, cut to -0.4, and 0.8: mean 0.2. The gradient of a token that is not cut is -s A.
    """
    gaps = doubles(0.6, -0.8, -0.6, 0.8)
    proximal = logs(0.3, 0.3, 0.3, 0.3)
    tokens = Tokens(proximal + gaps, proximal, proximal, doubles(2, 2, -1, -1), torch.tensor([0, 0, 1, 1]), 2)
    loss = gmpo(tokens)
    down, up = math.exp(-0.2), math.exp(0.2)
    assert loss.losses.tolist() == pytest.approx([-2 * down, -2 * down, up, up])
    assert flags(loss) == [True, False, True, False]
    assert policy_gradient(gmpo, tokens).tolist() == pytest.approx([0, -2 * down, 0, up])


@pytest.mark.parametrize("seed", range(3))
def test_gmpo_has_the_gradient_of_its_objective_over_trajectories(seed: int) -> None:
    tokens = random_tokens(seed)
    lengths = torch.bincount(tokens.sequences).double()
    per_sequence = torch.randn(tokens.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    good = (per_sequence > 0)[tokens.sequences]
    whole = Tokens(
        tokens.policy, tokens.proximal, tokens.behavior, per_sequence[tokens.sequences], tokens.sequences, tokens.count
    )

    def objective(policy: Tensor) -> Tensor:
        gaps = policy - tokens.proximal
        limited = torch.where(good, gaps.clamp(max=0.05), gaps.clamp(min=-0.05))
        sums = torch.zeros(tokens.count, dtype=torch.float64).index_add(0, tokens.sequences, limited)
        return -(torch.exp(sums / lengths) * per_sequence).sum()

    def ours(policy: Tensor) -> Tensor:
        losses = gmpo(moved_to(whole, policy), clip_low=0.05, clip_high=0.05).losses
        return (losses / lengths[tokens.sequences]).sum()

    torch.testing.assert_close(ours(tokens.policy), objective(tokens.policy))
    torch.testing.assert_close(gradient(ours, tokens.policy), central_differences(objective, tokens.policy))


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau"),
    [(1.0, 2.0, 1.0), (2.0, 2.0, 1.0), (0.5, 2.0, 1.0), (2.0, -2.0, 2.0), (0.5, -2.0, 2.0)],
)
def test_sapo_gates_by_a_sigmoid_of_the_ratio_and_never_to_nothing(ratio: float, advantage: float, tau: float) -> None:
    """f = 4/tau sigmoid(tau (r - 1)), of slope 4 p (1 - p) in r and that times r in log r; at r = 1: 2/tau, 1."""
    tokens = one_token(0.1 * ratio, 0.1, advantage)
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert sapo(tokens).losses.tolist() == pytest.approx([-4 / tau * p * advantage])
    assert policy_gradient(sapo, tokens).tolist() == pytest.approx([-4 * p * (1 - p) * ratio * advantage])
    assert sapo(tokens).clipped is None


@pytest.mark.parametrize(
    ("policy", "clip_low", "weight", "clipped"),
    [
        (0.15, 1.0, 1.28, True),  # 0.15/0.1 = 1.5 is above 1 + 0.28
        (0.12, 1.0, 1.2, False),
        (0.05, 1.0, 0.5, False),  # clip_low = 1 bounds nothing
        (0.05, 0.2, 0.8, True),
    ],
)
def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient(
    policy: float, clip_low: float, weight: float, clipped: bool
) -> None:
    tokens = one_token(policy, 0.1, advantage=2.0)
    loss = cispo(tokens, clip_low=clip_low)
    assert loss.losses.tolist() == pytest.approx([-weight * 2 * math.log(policy)])
    assert flags(loss) == [clipped]
    assert policy_gradient(partial(cispo, clip_low=clip_low), tokens).tolist() == pytest.approx([-weight * 2])


def test_reinforce_weights_by_the_ratio_up_to_its_cap() -> None:
    likelier, rarer = one_token(0.3, 0.1, advantage=2.0), one_token(0.05, 0.1, advantage=-1.0)
    # 0.3/0.1 = 3 under caps of 1, 5 and none; 0.05/0.1 = 0.5 under all of them.
    for cap, weight in ((1.0, 1.0), (5.0, 3.0), (None, 3.0)):
        assert policy_gradient(partial(reinforce, cap=cap), likelier).tolist() == pytest.approx([-weight * 2])
        assert policy_gradient(partial(reinforce, cap=cap), rarer).tolist() == pytest.approx([0.5])
    assert reinforce(likelier).losses.tolist() == pytest.approx([-2 * math.log(0.3)])
    assert flags(reinforce(likelier)) == [True]
    assert flags(reinforce(rarer)) == [False]
    assert reinforce(likelier, cap=None).clipped is None


def test_reinforce_bounds_a_bad_token_by_a_cap_of_its_own() -> None:
    good, bad = one_token(0.3, 0.1, advantage=2.0), one_token(0.4, 0.1, advantage=-1.0)
    # Ratios of 3 and 4; a bad token that has become likely is pushed down by all of it, or by what its cap leaves.
    for bad_cap, weight in ((None, 1.0), (2.0, 2.0), (5.0, 4.0)):
        loss = partial(reinforce, cap=1.0, bad_cap=bad_cap)
        assert policy_gradient(loss, good).tolist() == pytest.approx([-2])
        assert policy_gradient(loss, bad).tolist() == pytest.approx([weight])
    assert flags(reinforce(bad, cap=1.0, bad_cap=5.0)) == [False]
    assert flags(reinforce(bad, cap=None, bad_cap=2.0)) == [True]
    assert flags(reinforce(good, cap=None, bad_cap=2.0)) == [False]


@pytest.mark.parametrize(
    ("policy", "advantage", "weight", "clipped"),
    [
        (0.3, 2.0, 1.0, False),  # good tokens have no ratio, whichever way they moved
        (0.05, 2.0, 1.0, False),
        (0.3, -2.0, 1.0, True),  # 3 is tapered to 1
        (0.05, -2.0, 0.5, False),
    ],
)
def test_topr_tapers_the_bad_tokens_only(policy: float, advantage: float, weight: float, clipped: bool) -> None:
    tokens = one_token(policy, 0.1, advantage)
    assert topr(tokens).losses.tolist() == pytest.approx([-weight * advantage * math.log(policy)])
    assert flags(topr(tokens)) == [clipped]
    assert policy_gradient(topr, tokens).tolist() == pytest.approx([-weight * advantage])
    sided = partial(topr, positive_weight=0.25, negative_weight=4.0)
    side = 0.25 if advantage > 0 else 4.0
    assert policy_gradient(sided, tokens).tolist() == pytest.approx([-side * weight * advantage])


def test_kimi_pulls_back_by_the_squared_distance_to_the_proximal_policy() -> None:
    tokens = one_token(0.2, 0.1, advantage=2.0)
    # The gap is ln 2: -2 ln 0.2 + 0.1/2 (ln 2)^2, with slope -2 + 0.1 ln 2.
    assert kimi(tokens).losses.tolist() == pytest.approx([-2 * math.log(0.2) + 0.05 * math.log(2) ** 2])
    assert policy_gradient(kimi, tokens).tolist() == pytest.approx([-2 + 0.1 * math.log(2)])
    assert kimi(tokens).clipped is None


@pytest.mark.parametrize("proximal", [0.1, 0.9])
def test_dro_pulls_back_by_the_squared_distance_to_who_sampled_and_stops_at_advantage_over_beta(
    proximal: float,
) -> None:
    """Beta 0.5. Gaps of ln 2, 0 and -ln 4: slopes -2 + ln(2)/2, 1 and -ln(4)/2, the last without an advantage. With A =
    0.5 the slope is 0 at 0.5 / 0.5 = 1 nat above.
    """
    tokens = Tokens(
        policy=doubles(math.log(0.2), math.log(0.3), math.log(0.1), math.log(0.1) + 1.0),
        proximal=logs(*[proximal] * 4),
        behavior=logs(0.1, 0.3, 0.4, 0.1),
        advantages=doubles(2, -1, 0, 0.5),
        sequences=torch.tensor([0, 0, 1, 1]),
        count=2,
    )
    halved = partial(dro, beta=0.5)
    two = math.log(2)
    expected = [-2 * math.log(0.2) + two**2 / 4, math.log(0.3), two**2, -0.5 * (math.log(0.1) + 1) + 0.25]
    assert halved(tokens).losses.tolist() == pytest.approx(expected)
    assert policy_gradient(halved, tokens).tolist() == pytest.approx([-2 + two / 2, 1, -two, 0], abs=1e-12)
    assert halved(tokens).clipped is None


@pytest.mark.parametrize(
    ("policy", "behavior", "advantage", "dropped"),
    [
        (0.35, 0.1, 2.0, True),  # up by 0.25
        (0.25, 0.1, 2.0, False),  # up by 0.15
        (0.1, 0.35, 2.0, False),  # a good token that fell is pulled back up, however far it fell
        (0.1, 0.35, -2.0, True),  # down by 0.25
        (0.35, 0.1, -2.0, False),
        (0.1, 0.001, 2.0, False),  # a hundred times likelier, but only by 0.099
        (0.999, 0.7, 2.0, True),  # a ratio of 1.43, but up by 0.299
    ],
)
def test_dppo_drops_a_token_by_the_difference_of_probabilities(
    policy: float, behavior: float, advantage: float, dropped: bool
) -> None:
    tokens = one_token(policy, behavior, advantage)
    ratio, gap = policy / behavior, math.log(policy / behavior)
    gain = 0.0 if dropped else ratio * advantage
    assert dppo(tokens).losses.tolist() == pytest.approx([1e-3 * gap**2 - gain])
    assert flags(dppo(tokens)) == [dropped]
    # The ratio's derivative by the logprob is the ratio.
    assert policy_gradient(dppo, tokens).tolist() == pytest.approx([2e-3 * gap - gain])


@pytest.mark.parametrize(
    ("policy", "behavior", "advantage", "divergence", "dropped"),
    [
        (0.8, 0.5, 2.0, 0.2231436, True),  # 0.5 ln(0.5/0.8) + 0.5 ln(0.5/0.2) = 0.5 ln(0.25/0.16)
        (0.8, 0.5, -2.0, 0.2231436, False),  # a bad token that rose is pushed back down
        (0.6, 0.5, 2.0, 0.0204110, False),
        (0.2, 0.5, -2.0, 0.2231436, True),
        (0.2, 0.5, 2.0, 0.2231436, False),
        (0.02, 0.001, 2.0, 0.0162, False),  # twenty times likelier
        (0.215, 0.1, 2.0, 0.0465, False),  # 0.057 the other way round
        (0.999, 0.9, 2.0, 0.3665, True),  # up by 0.099 alone, but the others fell to a hundredth
    ],
)
def test_dppo_with_a_limit_on_the_divergence_drops_by_that_in_the_same_directions(
    policy: float, behavior: float, advantage: float, divergence: float, dropped: bool
) -> None:
    """KL(behavior || policy) of the token against all others; the limit is 0.05."""
    found = binary_kl(logprobs=logs(behavior), against=logs(policy))
    assert found.tolist() == pytest.approx([divergence], abs=2e-4)
    tokens = one_token(policy, behavior, advantage)
    loss = partial(dppo, kl_limit=0.05)
    ratio, gap = policy / behavior, math.log(policy / behavior)
    gain = 0.0 if dropped else ratio * advantage
    assert loss(tokens).losses.tolist() == pytest.approx([1e-3 * gap**2 - gain])
    assert flags(loss(tokens)) == [dropped]
    assert policy_gradient(loss, tokens).tolist() == pytest.approx([2e-3 * gap - gain])


def test_vespo_weighs_a_trajectory_by_its_product_of_ratios_and_by_the_sign_of_its_advantage() -> None:
    """Trajectory 0, A = 2: ratios 2 and 1, W = 2, phi = 2^2 e^-3. Trajectory 1, A = -1: 0.5 and 0.5, W = 1/4, phi =
    4^-3 e^1.5. Trajectory 2, A = -1: 2, phi = 2^3 e^-2.
    """
    tokens = Tokens(
        policy=logs(0.2, 0.3, 0.1, 0.2, 0.4),
        proximal=logs(0.9, 0.9, 0.9, 0.9, 0.9),
        behavior=logs(0.1, 0.3, 0.2, 0.4, 0.2),
        advantages=doubles(2, 2, -1, -1, -1),
        sequences=torch.tensor([0, 0, 1, 1, 2]),
        count=3,
    )
    up, down, bad = 4 * math.exp(-3), math.exp(1.5) / 64, 8 * math.exp(-2)
    slopes = policy_gradient(vespo, tokens).tolist()
    assert slopes == pytest.approx([-2 * up, -2 * up, down, down, bad])
    losses = vespo(tokens).losses.tolist()
    assert losses == pytest.approx([s * math.log(p) for s, p in zip(slopes, (0.2, 0.3, 0.1, 0.2, 0.4), strict=True)])
    assert vespo(tokens).clipped is None


def test_vespos_weight_is_greatest_at_power_over_rate_and_gone_far_from_1_on_both_sides() -> None:
    weight = GammaWeight(power=3.0, rate=2.0)
    around = torch.log(doubles(1.4, 1.5, 1.6))
    below, at, above = weight.log(around).tolist()
    assert at > max(below, above)
    assert torch.exp(weight.log(doubles(-20.0, 20.0))).tolist() == pytest.approx([0.0, 0.0], abs=1e-20)


@every_loss
def test_where_the_policy_has_not_moved_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    drawn = random_tokens(0)
    still = Tokens(drawn.policy, drawn.policy, drawn.policy, drawn.advantages, drawn.sequences, drawn.count)
    torch.testing.assert_close(policy_gradient(LOSSES[name], still), -drawn.advantages)
    # REINFORCE itself, -A log p, by finite differences.
    plain = central_differences(lambda policy: -(drawn.advantages * policy).sum(), drawn.policy)
    torch.testing.assert_close(policy_gradient(LOSSES[name], still), plain)


@pytest.mark.parametrize("name", ["clip", "dual_clip", "sapo", "kimi", "dro", "dppo", "dppo_kl"])
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_without_stopped_gradients_has_the_gradient_of_finite_differences(name: str, seed: int) -> None:
    tokens = random_tokens(seed)
    leaf = tokens.policy.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda policy: LOSSES[name](moved_to(tokens, policy)).losses, (leaf,))


@pytest.mark.parametrize("seed", range(3))
def test_within_its_bounds_a_weighted_logprob_has_the_gradient_of_the_importance_sampled_gain(seed: int) -> None:
    tokens = random_tokens(seed)

    def objective(policy: Tensor) -> Tensor:
        return -(torch.exp(policy - tokens.behavior) * tokens.advantages).sum()

    expected = central_differences(objective, tokens.policy)
    for loss in (partial(reinforce, cap=None), partial(reinforce, cap=100.0)):
        torch.testing.assert_close(policy_gradient(loss, tokens), expected)
    within = ~torch.tensor(flags(cispo(tokens)))
    assert within.any()
    torch.testing.assert_close(policy_gradient(cispo, tokens)[within], expected[within])
    tapered = (tokens.advantages <= 0) & (tokens.policy < tokens.behavior)
    torch.testing.assert_close(policy_gradient(topr, tokens)[tapered], expected[tapered])


@every_loss
def test_the_weighted_loss_and_its_gradient_do_not_depend_on_the_split_into_microbatches(name: str) -> None:
    tokens = random_tokens(7, count=5)
    weights = 1.0 / (tokens.count * torch.bincount(tokens.sequences).double()[tokens.sequences])

    def total(policy: Tensor, parts: list[list[int]]) -> Tensor:
        moved = moved_to(tokens, policy)
        return sum((_part_total(name, moved, weights, part) for part in parts), start=policy.new_zeros(()))

    whole = [[0, 1, 2, 3, 4]]
    for parts in ([[0, 1], [2, 3, 4]], [[4, 0], [3], [1, 2]], [[0], [1], [2], [3], [4]]):
        torch.testing.assert_close(total(tokens.policy, parts), total(tokens.policy, whole))
        torch.testing.assert_close(
            gradient(partial(total, parts=parts), tokens.policy), gradient(partial(total, parts=whole), tokens.policy)
        )


def _part_total(name: str, tokens: Tokens, weights: Tensor, numbers: list[int]) -> Tensor:
    """The weighted loss of a microbatch of the sequences `numbers`, renumbered in that order and end to end."""
    indices = torch.cat([torch.nonzero(tokens.sequences == number)[:, 0] for number in numbers])
    lengths = torch.tensor([int((tokens.sequences == number).sum()) for number in numbers])
    part = Tokens(
        policy=tokens.policy[indices],
        proximal=tokens.proximal[indices],
        behavior=tokens.behavior[indices],
        advantages=tokens.advantages[indices],
        sequences=torch.repeat_interleave(torch.arange(len(numbers)), lengths),
        count=len(numbers),
    )
    return (weights[indices] * LOSSES[name](part).losses).sum()


@every_loss
def test_losses_and_gradients_stay_finite_for_impossible_and_far_apart_logprobs(name: str) -> None:
    wild = [0.0, -1e-30, -90.0, -1000.0, -math.inf]
    cases = list(itertools.product(wild, wild, wild, (-3.0, 0.0, 3.0)))
    policy, proximal, behavior, advantages = (torch.tensor(column) for column in zip(*cases, strict=True))
    tokens = Tokens(policy, proximal, behavior, advantages, torch.arange(len(cases)), len(cases))
    assert torch.isfinite(LOSSES[name](tokens).losses).all()
    assert torch.isfinite(policy_gradient(LOSSES[name], tokens)).all()


@every_loss
def test_a_microbatch_without_trained_tokens_has_no_loss(name: str) -> None:
    nothing = doubles()
    empty = Tokens(nothing, nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64), 0)
    assert LOSSES[name](empty).losses.shape == (0,)


def test_the_likelihood_loss_is_the_negative_logprob() -> None:
    losses = policy_loss.negative_log_likelihood(policy_logprobs=logs(0.5, 0.1))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(10)])
