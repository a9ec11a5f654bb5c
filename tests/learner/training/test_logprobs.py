import math

import pytest
import torch
from torch import Tensor

from learner.training.logits import LogitRules
from learner.training.logprobs import (
    Chunking,
    LogprobHead,
    LowRankLogits,
    TokenLogprobs,
    logprobs_with_norms,
    token_logprobs,
)

TOKENS, VOCABULARY, CANDIDATES = 7, 11, 4
CHUNKINGS = [Chunking(100, 100), Chunking(3, 100), Chunking(100, 4), Chunking(2, 3), Chunking(1, 1)]
SLOPES = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
CANDIDATE_SLOPES = torch.linspace(-2, 1, TOKENS * CANDIDATES, dtype=torch.float64).view(TOKENS, CANDIDATES)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 5, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, 5, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def candidates_of(target: Tensor) -> Tensor:
    """Four per row: the target itself, the last token of the vocabulary, and another token twice."""
    other = (target + 3) % VOCABULARY
    return torch.stack([other, target, torch.full_like(target, VOCABULARY - 1), other], dim=1)


def heads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    candidates: Tensor | None = None,
    temperature: float = 1.0,
    chunking: Chunking = CHUNKINGS[0],
    entropy_gradient: bool = True,
) -> TokenLogprobs:
    return token_logprobs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        target=target,
        candidates=candidates,
        temperature=temperature,
        chunking=chunking,
        with_entropy=True,
        entropy_gradient=entropy_gradient,
    )


def known(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def test_unrounded_products_of_bfloat16_are_those_of_float32() -> None:
    exact_hidden, exact_weight, exact_bias, target = problem()
    hidden, weight, bias = ((30 * each.detach()).bfloat16() for each in (exact_hidden, exact_weight, exact_bias))
    logits = hidden.double() @ weight.double().T + bias.double()
    expected = logits.log_softmax(1).gather(1, target[:, None])[:, 0]

    def gap(*, unrounded: bool) -> float:
        found = token_logprobs(
            hidden=hidden,
            weight=weight,
            bias=bias,
            target=target,
            temperature=1.0,
            chunking=Chunking(3, 4),
            with_entropy=False,
            rules=LogitRules(unrounded=unrounded),
        )
        assert found.logprobs.dtype == torch.float32
        return float((found.logprobs - expected).abs().max())

    # Logits of thousands have steps of 8 and more in bfloat16.
    assert gap(unrounded=True) < 1e-2 < 1 < gap(unrounded=False)


def test_unrounded_products_have_the_gradients_of_the_formula() -> None:
    hidden, weight, bias, target = (
        each.bfloat16().detach().requires_grad_() if each.is_floating_point() else each for each in problem()
    )
    found = token_logprobs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        target=target,
        temperature=0.7,
        chunking=Chunking(3, 4),
        with_entropy=False,
        rules=LogitRules(unrounded=True),
        low_rank=LowRankLogits(torch.ones(TOKENS, 1, dtype=torch.bfloat16), torch.ones(VOCABULARY, 1).bfloat16()),
    )
    ours = torch.autograd.grad(found.logprobs.sum(), (hidden, weight, bias))
    whole = torch.log_softmax((hidden.float() @ weight.float().T + bias.float() + 1) / 0.7, dim=1)
    expected = torch.autograd.grad(whole.gather(1, target[:, None]).sum(), (hidden, weight, bias))
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.01


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_and_their_gradients_are_those_of_log_softmax(chunking: Chunking, temperature: float) -> None:
    hidden, weight, bias, target = problem()
    result = heads(hidden, weight, bias, target, temperature=temperature, chunking=chunking, entropy_gradient=False)
    whole = torch.log_softmax((hidden @ weight.T + bias) / temperature, dim=1)
    torch.testing.assert_close(result.logprobs, whole.gather(1, target[:, None])[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(known(result.entropy), -(whole.exp() * whole).sum(1), rtol=0, atol=1e-12)
    ours = torch.autograd.grad((SLOPES * result.logprobs).sum(), (hidden, weight, bias))
    expected = torch.autograd.grad((SLOPES * whole.gather(1, target[:, None])[:, 0]).sum(), (hidden, weight, bias))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_norms_are_those_of_the_gradients_of_logprobs_by_the_logits(chunking: Chunking, temperature: float) -> None:
    hidden, weight, bias, target = problem()
    logprobs, norms = logprobs_with_norms(
        hidden=hidden, weight=weight, bias=bias, target=target, temperature=temperature, chunking=chunking
    )
    assert not logprobs.requires_grad
    assert not norms.requires_grad
    logits = ((hidden @ weight.T + bias) / temperature).detach().requires_grad_()
    whole = torch.log_softmax(logits, dim=1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprobs, whole.detach(), rtol=0, atol=1e-12)
    (slopes,) = torch.autograd.grad(whole.sum(), logits)
    torch.testing.assert_close(norms, slopes.square().sum(1), rtol=0, atol=1e-12)


def test_the_norm_of_one_token_of_three_is_that_worked_by_hand() -> None:
    """Probabilities 1/4, 1/4 and 1/2: 1 - 2/4 + (1 + 1 + 4)/16 = 7/8 for the first, 1 - 1 + 6/16 for the last."""
    weight = torch.tensor([1.0, 1.0, 2.0]).log()[:, None]
    _, norms = logprobs_with_norms(
        hidden=torch.ones(2, 1),
        weight=weight,
        bias=None,
        target=torch.tensor([0, 2]),
        temperature=1.0,
        chunking=Chunking(1, 2),
    )
    assert norms.tolist() == pytest.approx([0.875, 0.375])


@pytest.mark.parametrize("rules", [LogitRules(factor=0.3), LogitRules(factor=1.5, softcap=2.0)], ids=str)
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_scaled_and_capped_logits_have_the_gradients_of_their_formula(rules: LogitRules, chunking: Chunking) -> None:
    hidden, weight, bias, target = problem()
    result = token_logprobs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        target=target,
        candidates=candidates_of(target),
        temperature=0.7,
        chunking=chunking,
        with_entropy=True,
        entropy_gradient=True,
        rules=rules,
    )
    logits = rules.factor * (hidden @ weight.T + bias)
    logits = logits if rules.softcap is None else rules.softcap * torch.tanh(logits / rules.softcap)
    whole = torch.log_softmax(logits / 0.7, dim=1)
    of_entropy = -(whole.exp() * whole).sum(1)
    of_candidates = whole.gather(1, candidates_of(target))
    torch.testing.assert_close(result.logprobs, whole.gather(1, target[:, None])[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(known(result.candidates), of_candidates, rtol=0, atol=1e-12)

    def total(entropy: Tensor, candidates: Tensor) -> Tensor:
        return (SLOPES * entropy).sum() + (CANDIDATE_SLOPES * candidates).sum()

    ours = torch.autograd.grad(total(known(result.entropy), known(result.candidates)), (hidden, weight, bias))
    expected = torch.autograd.grad(total(of_entropy, of_candidates), (hidden, weight, bias))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rules", [LogitRules(), LogitRules(factor=1.5, softcap=2.0)], ids=str)
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_a_low_rank_term_is_the_same_as_another_weight(rules: LogitRules, chunking: Chunking) -> None:
    hidden, weight, bias, target = problem()
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    up = torch.randn(VOCABULARY, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = (hidden, weight, bias, down, up)
    candidates = candidates_of(target)

    def found(matrix: Tensor, low_rank: LowRankLogits | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        made = token_logprobs(
            hidden=hidden,
            weight=matrix,
            bias=bias,
            target=target,
            candidates=candidates,
            temperature=0.7,
            chunking=chunking,
            with_entropy=True,
            entropy_gradient=True,
            rules=rules,
            low_rank=low_rank,
        )
        total = (SLOPES * made.logprobs).sum() + (CANDIDATE_SLOPES * known(made.candidates)).sum()
        return made.logprobs, torch.autograd.grad(total + (SLOPES * known(made.entropy)).sum(), inputs)

    ours, gradients = found(weight, LowRankLogits(hidden @ down.T, up))
    merged, expected = found(weight + up @ down, None)
    torch.testing.assert_close(ours, merged, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-11)


def test_a_frozen_weight_gets_no_gradient_beside_a_low_rank_term() -> None:
    hidden, weight, _, target = problem()
    features, up = torch.ones(TOKENS, 2, dtype=torch.float64), torch.ones(VOCABULARY, 2, dtype=torch.float64)
    weight.requires_grad_(False)
    low_rank = LowRankLogits(features, up.requires_grad_())
    made = token_logprobs(
        hidden=hidden.detach(),
        weight=weight,
        bias=None,
        target=target,
        temperature=1.0,
        chunking=Chunking(),
        with_entropy=False,
        low_rank=low_rank,
    )
    (gradient,) = torch.autograd.grad(made.logprobs.sum(), up)
    assert bool(gradient.any())
    assert weight.grad is None


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_candidates_and_entropy_and_their_gradients_are_those_of_log_softmax(
    chunking: Chunking, temperature: float
) -> None:
    hidden, weight, bias, target = problem()
    candidates = candidates_of(target)
    result = heads(hidden, weight, bias, target, candidates=candidates, temperature=temperature, chunking=chunking)
    whole = torch.log_softmax((hidden @ weight.T + bias) / temperature, dim=1)
    entropy = -(whole.exp() * whole).sum(1)
    torch.testing.assert_close(known(result.candidates), whole.gather(1, candidates), rtol=0, atol=1e-12)
    torch.testing.assert_close(known(result.entropy), entropy, rtol=0, atol=1e-12)

    def total(logprobs: Tensor, entropy: Tensor, of_candidates: Tensor) -> Tensor:
        return (SLOPES * logprobs).sum() + (SLOPES.cos() * entropy).sum() + (CANDIDATE_SLOPES * of_candidates).sum()

    found = total(result.logprobs, known(result.entropy), known(result.candidates))
    wanted = total(whole.gather(1, target[:, None])[:, 0], entropy, whole.gather(1, candidates))
    ours = torch.autograd.grad(found, (hidden, weight, bias))
    torch.testing.assert_close(ours, torch.autograd.grad(wanted, (hidden, weight, bias)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunking", [CHUNKINGS[0], CHUNKINGS[3]])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_are_those_of_finite_differences(chunking: Chunking, with_bias: bool) -> None:
    hidden, weight, bias, target = problem()
    candidates = candidates_of(target)

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        result = heads(hidden, weight, bias, target, candidates=candidates, temperature=0.8, chunking=chunking)
        return result.logprobs, known(result.entropy), known(result.candidates)

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias) if with_bias else (hidden, weight))


def test_the_gradient_of_the_entropy_is_that_worked_by_hand() -> None:
    # Two tokens with logits z = 2 ln 3 and 0 at temperature 2: p = sigmoid(z / 2) = 3/4, H = ln 4 - 3/4 ln 3.
    # dH/dp = ln((1 - p) / p) = -ln 3 and dp/dz = p (1 - p) / 2 = 3/32, so dH/dz = -3 ln 3 / 32; the other logit's
    # gradient is the opposite, since a shift of both changes nothing.
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[2 * math.log(3)], [0.0]], dtype=torch.float64, requires_grad=True)
    entropy = known(heads(hidden, weight, None, torch.tensor([0]), temperature=2.0, chunking=Chunking(1, 1)).entropy)
    entropy.sum().backward()  # type: ignore[no-untyped-call]
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    slope = 3 * math.log(3) / 32
    assert known(weight.grad)[:, 0].tolist() == pytest.approx([-slope, slope])


def test_logprobs_of_candidates_are_those_worked_by_hand() -> None:
    # Logits ln 1, ln 2 and ln 5 have the probabilities 1/8, 2/8 and 5/8. The gradient of a logprob with respect to the
    # logits is its unit vector less these probabilities; that of tokens 2, 0 and 2 together (1, 0, 2) - 3 (1, 2, 5)/8.
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], dtype=torch.float64, requires_grad=True)
    result = heads(
        hidden, weight, None, torch.tensor([1]), candidates=torch.tensor([[2, 0, 2]]), chunking=Chunking(1, 2)
    )
    found = known(result.candidates)
    assert found[0].tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 8), math.log(5 / 8)])
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert known(weight.grad)[:, 0].tolist() == pytest.approx([5 / 8, -6 / 8, 1 / 8])


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_a_candidate_beyond_the_vocabulary_is_impossible_and_has_no_gradient(chunking: Chunking) -> None:
    """As of a teacher's output matrix that has more rows."""
    found = []
    for beyond in ([], [VOCABULARY, VOCABULARY + 7]):
        inputs = hidden, weight, bias, target = problem()
        more = torch.tensor(beyond, dtype=torch.int64).expand(TOKENS, -1)
        candidates = known(
            heads(*inputs, candidates=torch.cat([candidates_of(target), more], 1), chunking=chunking).candidates
        )
        own, others = candidates[:, :CANDIDATES], candidates[:, CANDIDATES:]
        assert (others == -torch.inf).all()
        (CANDIDATE_SLOPES * own).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        others.clamp(min=-1e8).sum().backward() if beyond else None  # type: ignore[no-untyped-call]
        found.append([hidden.grad, weight.grad, bias.grad])
    for with_others, alone in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(with_others, alone)


def test_an_entropy_without_gradient_adds_none() -> None:
    hidden, weight, bias, target = problem()
    plain = heads(hidden, weight, bias, target, entropy_gradient=False)
    assert not known(plain.entropy).requires_grad
    assert known(heads(hidden, weight, bias, target).entropy).requires_grad


def test_a_gradient_can_come_from_the_entropy_or_the_candidates_alone() -> None:
    hidden, weight, bias, target = problem()
    whole = torch.log_softmax(hidden @ weight.T + bias, dim=1)
    result = heads(hidden, weight, bias, target, candidates=target[:, None])
    from_entropy = torch.autograd.grad(known(result.entropy).sum(), hidden, retain_graph=True)
    expected = torch.autograd.grad(-(whole.exp() * whole).sum(), hidden, retain_graph=True)
    torch.testing.assert_close(from_entropy, expected, rtol=0, atol=1e-12)
    from_candidates = torch.autograd.grad(known(result.candidates).sum(), hidden, retain_graph=True)
    torch.testing.assert_close(from_candidates, torch.autograd.grad(result.logprobs.sum(), hidden), rtol=0, atol=1e-12)


def test_what_is_frozen_gets_no_gradient() -> None:
    hidden, weight, bias, target = problem()
    result = heads(hidden, weight.detach(), bias.detach(), target)
    (expected,) = torch.autograd.grad(heads(hidden, weight, bias, target).logprobs.sum(), hidden)
    (found,) = torch.autograd.grad(result.logprobs.sum(), hidden)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_candidates_that_are_the_whole_vocabulary_give_one_and_the_entropy(temperature: float) -> None:
    hidden, weight, bias, target = problem()
    everything = torch.arange(VOCABULARY).expand(TOKENS, -1)
    result = heads(
        hidden, weight, bias, target, candidates=everything, temperature=temperature, chunking=Chunking(2, 3)
    )
    logprobs = known(result.candidates)
    torch.testing.assert_close(logprobs.exp().sum(1), torch.ones(TOKENS, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(known(result.entropy), -(logprobs.exp() * logprobs).sum(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.logprobs, logprobs.gather(1, target[:, None])[:, 0], rtol=0, atol=0)


def test_a_temperature_is_the_same_as_smaller_logits() -> None:
    hidden, weight, bias, target = problem()
    candidates = candidates_of(target)
    warm = heads(hidden, weight, bias, target, candidates=candidates, temperature=4.0)
    # Dividing by a power of two is exact.
    small = heads(hidden, weight / 4, bias / 4, target, candidates=candidates)
    torch.testing.assert_close(warm.logprobs, small.logprobs, rtol=0, atol=0)
    torch.testing.assert_close(known(warm.candidates), known(small.candidates), rtol=0, atol=0)
    torch.testing.assert_close(known(warm.entropy), known(small.entropy), rtol=0, atol=0)


def test_logits_far_from_zero_neither_overflow_nor_lose_the_entropy() -> None:
    # Two tokens at 1000 and one at -1000: the chosen one has probability 1/2, the entropy is ln 2.
    result = heads(
        torch.ones(1, 1),
        torch.tensor([[1000.0], [-1000.0], [1000.0]]),
        None,
        torch.tensor([2]),
        candidates=torch.tensor([[0, 1]]),
        chunking=Chunking(1, 1),
    )
    assert result.logprobs.item() == pytest.approx(-math.log(2))
    assert known(result.entropy).item() == pytest.approx(math.log(2))
    assert known(result.candidates)[0].tolist() == pytest.approx([-math.log(2), -2000 - math.log(2)])


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    hidden, weight, _, target = problem(torch.bfloat16)
    result = heads(hidden, weight, None, target, candidates=candidates_of(target), chunking=Chunking(3, 4))
    whole = torch.log_softmax((hidden @ weight.T).float(), dim=1)
    torch.testing.assert_close(result.logprobs, whole.gather(1, target[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(known(result.candidates), whole.gather(1, candidates_of(target)), rtol=0, atol=1e-5)
    (result.logprobs.sum() + known(result.entropy).sum()).backward()  # type: ignore[no-untyped-call]
    assert known(weight.grad).dtype == torch.bfloat16


def test_no_tokens_give_nothing_and_gradients_of_zero() -> None:
    hidden, weight, bias, target = problem()
    result = heads(hidden[:0], weight, bias, target[:0], candidates=candidates_of(target)[:0])
    assert result.logprobs.shape == known(result.entropy).shape == (0,)
    assert known(result.candidates).shape == (0, CANDIDATES)
    (slope,) = torch.autograd.grad(result.logprobs.sum(), weight)
    assert slope.abs().sum() == 0


def test_a_head_shares_the_parameters_of_the_projection_and_still_gives_logits() -> None:
    linear = torch.nn.Linear(5, 11)
    head = LogprobHead.sharing(linear)
    inputs = torch.randn(2, 3, 5)
    assert head.weight is linear.weight
    torch.testing.assert_close(head(inputs), linear(inputs))
