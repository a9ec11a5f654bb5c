import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.knobs import KlForm
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
    estimate = ratios.penalty(
        form=form, policy_logprobs=floats([0.25, 0.3]).log(), reference_logprobs=floats([0.5, 0.3]).log()
    )
    assert estimate.tolist() == pytest.approx([expected, 0.0], abs=1e-12)


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_k1_and_k3_average_to_the_divergence(form: KlForm) -> None:
    estimate = ratios.penalty(form=form, policy_logprobs=POLICY.log(), reference_logprobs=REFERENCE.log())
    assert float((POLICY * estimate).sum()) == pytest.approx(float(divergence(POLICY, REFERENCE)), rel=1e-9)


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_mean_over_samples_is_the_divergence_within_its_standard_error(form: KlForm) -> None:
    count = 20_000
    tokens = torch.multinomial(POLICY, count, replacement=True, generator=torch.Generator().manual_seed(0))
    estimate = ratios.penalty(
        form=form, policy_logprobs=POLICY.log()[tokens], reference_logprobs=REFERENCE.log()[tokens]
    )
    tolerance = 5 * float(estimate.std()) / math.sqrt(count)
    assert float(estimate.mean()) == pytest.approx(float(divergence(POLICY, REFERENCE)), abs=tolerance)


@pytest.mark.parametrize(
    ("form", "policy", "expected"),
    [
        # d = reference - policy = 3: e^3 - 4 = 16.1, bounded; 2.5: e^2.5 - 3.5 = 8.68; 5: 12.5, bounded; 4: 8.
        ("k3", [-3.0, -2.5], [10.0, math.exp(2.5) - 3.5]),
        ("k2", [-5.0, -4.0], [10.0, 8.0]),
        # The other side of k3 is as good as linear: d = -10.9 gives 9.9, and is no wild token.
        ("k3", [10.9, 12.0], [9.9 + math.exp(-10.9), 10.0]),
    ],
)
def test_the_estimate_is_bounded_and_not_its_argument(form: KlForm, policy: list[float], expected: list[float]) -> None:
    leaf = floats(policy).requires_grad_()
    estimate = ratios.penalty(form=form, policy_logprobs=leaf, reference_logprobs=floats([0.0, 0.0]))
    assert estimate.tolist() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(estimate.sum(), leaf)
    assert [value != 0 for value in gradient.tolist()] == [value < 10 for value in expected]


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_weighted_by_the_ratio_estimate_and_gradient_are_those_of_the_divergence_on_anothers_samples(
    form: KlForm,
) -> None:
    """Over tokens of the behavior policy b: sum b (p/b) k = KL(p || q), for every p, so that gradients agree too."""
    behavior = floats([0.2, 0.3, 0.5])
    logits = POLICY.log().requires_grad_()
    estimate = ratios.weighted(
        form=form,
        policy_logprobs=logits.log_softmax(0),
        reference_logprobs=REFERENCE.log(),
        behavior_logprobs=behavior.log(),
    )
    mean = (behavior * estimate).sum()
    assert float(mean.detach()) == pytest.approx(float(divergence(POLICY, REFERENCE)), rel=1e-9)
    (gradient,) = torch.autograd.grad(mean, logits)
    assert gradient.tolist() == pytest.approx(exact_gradient(lambda p: divergence(p, REFERENCE)), abs=1e-12)


def test_the_weight_of_an_estimate_is_bounded() -> None:
    """k2 of a gap of 1 is 1/2; rho = e^5 = 148 counts as 10, without a gradient of its own: 10 x d(d^2/2) = 10."""
    policy = floats([0.0]).requires_grad_()
    found = ratios.weighted(
        form="k2", policy_logprobs=policy, reference_logprobs=floats([-1.0]), behavior_logprobs=floats([-5.0])
    )
    assert found.tolist() == [5.0]
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert gradient.tolist() == [10.0]


@settings(deadline=None)
@given(policy=st.floats(-50, 0), reference=st.floats(-50, 0))
def test_k2_and_k3_are_never_negative(policy: float, reference: float) -> None:
    for form in ("k2", "k3"):
        estimate = ratios.penalty(form=form, policy_logprobs=floats([policy]), reference_logprobs=floats([reference]))
        assert float(estimate) >= 0.0


def expected_gradient(form: KlForm) -> list[float]:
    """The gradient, in the policy's logits, of the form as a loss on samples: the sampling itself has none."""
    logits = POLICY.log().requires_grad_()
    estimate = ratios.penalty(form=form, policy_logprobs=logits.log_softmax(0), reference_logprobs=REFERENCE.log())
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
        lambda logprobs: ratios.penalty(form=form, policy_logprobs=logprobs, reference_logprobs=reference),
        (policy,),
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [("k1", [-10.0, 10.0]), ("k2", [10.0, 10.0]), ("k3", [10.0, 10.0])],
)
def test_wild_logprobs_are_bounded_and_pull_at_nothing(form: KlForm, expected: list[float]) -> None:
    policy = floats([-1000.0, 0.0]).requires_grad_()
    estimate = ratios.penalty(form=form, policy_logprobs=policy, reference_logprobs=floats([0.0, -1000.0]))
    assert estimate.tolist() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    assert gradient.tolist() == [0.0, 0.0]
