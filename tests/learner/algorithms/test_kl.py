import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms import kl
from learner.algorithms.choices import KlForm
from tests.learner.algorithms.steps import floats

FORMS: tuple[KlForm, ...] = ("k1", "k2", "k3")
POLICY, REFERENCE = floats([0.7, 0.2, 0.1]), floats([0.6, 0.25, 0.15])


def divergence(first: Tensor, second: Tensor) -> Tensor:
    return (first * (first / second).log()).sum()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        # policy 0.25, reference 0.5: policy - reference = -ln 2.
        ("k1", -math.log(2)),
        ("k2", 0.5 * math.log(2) ** 2),
        ("k3", 2 - 1 - math.log(2)),
    ],
)
def test_each_form_at_a_policy_half_as_likely_as_the_reference(form: KlForm, expected: float) -> None:
    estimate = kl.penalty(
        form=form, policy_logprobs=floats([0.25, 0.3]).log(), reference_logprobs=floats([0.5, 0.3]).log()
    )
    assert estimate.tolist() == pytest.approx([expected, 0.0], abs=1e-12)


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_k1_and_k3_average_to_the_divergence(form: KlForm) -> None:
    estimate = kl.penalty(form=form, policy_logprobs=POLICY.log(), reference_logprobs=REFERENCE.log())
    assert float((POLICY * estimate).sum()) == pytest.approx(float(divergence(POLICY, REFERENCE)), rel=1e-9)


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_mean_over_samples_is_the_divergence_within_its_standard_error(form: KlForm) -> None:
    count = 20_000
    tokens = torch.multinomial(POLICY, count, replacement=True, generator=torch.Generator().manual_seed(0))
    estimate = kl.penalty(form=form, policy_logprobs=POLICY.log()[tokens], reference_logprobs=REFERENCE.log()[tokens])
    tolerance = 5 * float(estimate.std()) / math.sqrt(count)
    assert float(estimate.mean()) == pytest.approx(float(divergence(POLICY, REFERENCE)), abs=tolerance)


@settings(deadline=None)
@given(policy=st.floats(-50, 0), reference=st.floats(-50, 0))
def test_k2_and_k3_are_never_negative(policy: float, reference: float) -> None:
    for form in ("k2", "k3"):
        estimate = kl.penalty(form=form, policy_logprobs=floats([policy]), reference_logprobs=floats([reference]))
        assert float(estimate) >= 0.0


def expected_gradient(form: KlForm) -> list[float]:
    """The gradient, in the policy's logits, of the form as a loss on samples: the sampling itself has none."""
    logits = POLICY.log().requires_grad_()
    estimate = kl.penalty(form=form, policy_logprobs=logits.log_softmax(0), reference_logprobs=REFERENCE.log())
    (gradient,) = torch.autograd.grad((POLICY * estimate).sum(), logits)
    values: list[float] = gradient.tolist()
    return values


def exact_gradient(loss: Callable[[Tensor], Tensor]) -> list[float]:
    logits = POLICY.log().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits.softmax(0)), logits)
    values: list[float] = gradient.tolist()
    return values


def test_what_each_form_minimises_when_it_is_part_of_a_loss() -> None:
    # Expected gradients: k1, sum p grad(log p) = grad(sum p) = 0. k2, sum p (log p - log q) grad(log p), which is the
    # gradient of sum p log(p/q) since sum p grad(log p) = 0. k3, sum p (1 - q/p) grad(log p) = -sum q grad(log p).
    assert expected_gradient("k1") == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    towards = exact_gradient(lambda policy: divergence(policy, REFERENCE))
    assert expected_gradient("k2") == pytest.approx(towards, abs=1e-12)
    backwards = exact_gradient(lambda policy: divergence(REFERENCE, policy))
    assert expected_gradient("k3") == pytest.approx(backwards, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form: KlForm) -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(20, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.randn(20, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(
        lambda logprobs: kl.penalty(form=form, policy_logprobs=logprobs, reference_logprobs=reference), (policy,)
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [("k1", [-10.0, 10.0]), ("k2", [50.0, 50.0]), ("k3", [math.exp(10) - 11, math.exp(-10) + 9])],
)
def test_wild_logprobs_are_bounded_and_pull_at_nothing(form: KlForm, expected: list[float]) -> None:
    policy = floats([-1000.0, 0.0]).requires_grad_()
    estimate = kl.penalty(form=form, policy_logprobs=policy, reference_logprobs=floats([0.0, -1000.0]))
    assert estimate.tolist() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    assert gradient.tolist() == [0.0, 0.0]
