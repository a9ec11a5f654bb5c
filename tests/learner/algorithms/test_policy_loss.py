import math

import pytest
import torch

from learner.algorithms import policy_loss, ratios


def log(*values: float) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def clip(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, bool]:
    loss = policy_loss.clip(
        policy_logprobs=log(0.1 * ratio),
        proximal_logprobs=log(0.1),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    return float(loss.losses), bool(loss.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.56, True),  # gains stop at 1.28 x 2
        (0.5, 2.0, -1.0, False),  # a good token that became rarer is pulled back without a bound
        (0.5, -2.0, 1.6, True),  # pushing down stops at 0.8 x 2
        (1.5, -2.0, 3.0, False),
    ],
)
def test_clip_takes_the_worse_of_the_plain_and_the_bounded_gain(
    ratio: float, advantage: float, expected: float, clipped: bool
) -> None:
    loss, was_clipped = clip(ratio, advantage)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert was_clipped is clipped


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    assert clip(10.0, -2.0)[0] == pytest.approx(20.0)
    bounded, clipped = clip(10.0, -2.0, dual_clip=3.0)
    assert clipped
    assert bounded == pytest.approx(6.0)
    assert clip(10.0, 2.0, dual_clip=3.0)[0] == pytest.approx(-2.56)


def test_the_gradient_of_the_clip_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(40, generator=generator, dtype=torch.float64, requires_grad=True)
    proximal = policy.detach() + 0.3 * torch.randn(40, generator=generator, dtype=torch.float64)
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)

    def losses(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_loss.clip(
            policy_logprobs=logprobs, proximal_logprobs=proximal, advantages=advantages, clip_low=0.2, clip_high=0.2
        ).losses

    assert torch.autograd.gradcheck(losses, (policy,))


def test_where_the_ratio_is_one_the_gradient_is_that_of_policy_gradient() -> None:
    policy = log(0.2, 0.7).requires_grad_()
    advantages = torch.tensor([1.5, -2.0], dtype=torch.float64)
    loss = policy_loss.clip(
        policy_logprobs=policy, proximal_logprobs=policy.detach(), advantages=advantages, clip_low=0.2, clip_high=0.2
    )
    loss.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-1.5, 2.0])


def test_k3_is_zero_at_equality_positive_elsewhere_and_has_the_gradient_of_kl() -> None:
    # d = ln(0.5 / 0.25) = ln 2: k3 = 2 - 1 - ln 2.
    estimate = ratios.k3(policy_logprobs=log(0.25, 0.3), reference_logprobs=log(0.5, 0.3))
    assert estimate.tolist() == pytest.approx([1 - math.log(2), 0.0], abs=1e-12)
    policy = torch.randn(20, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(20, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: ratios.k3(policy_logprobs=p, reference_logprobs=reference), (policy,))


def test_k3_stays_finite_where_a_logprob_is_wild() -> None:
    estimate = ratios.k3(policy_logprobs=torch.tensor([-1000.0, 0.0]), reference_logprobs=torch.tensor([0.0, -1000.0]))
    assert torch.isfinite(estimate).all()


def test_mismatch_averages_to_the_divergence_of_the_behavior_from_the_learner() -> None:
    behavior, learner = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.6, 0.25, 0.15])
    estimate = (behavior * ratios.mismatch(proximal_logprobs=learner.log(), behavior_logprobs=behavior.log())).sum()
    assert float(estimate) == pytest.approx(float((behavior * (behavior / learner).log()).sum()), rel=1e-5)
