import math

import pytest
import torch

from learner.training.head import LogprobHead
from learner.training.logprobs import Chunking, token_logprobs


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(11, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, 11, (7,), generator=generator)


CHUNKINGS = [Chunking(100, 100), Chunking(3, 100), Chunking(100, 4), Chunking(2, 3), Chunking(1, 1)]


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_and_their_gradients_are_those_of_log_softmax(chunking: Chunking, temperature: float) -> None:
    hidden, weight, bias, target = problem()
    slope = torch.linspace(-1, 1, 7, dtype=torch.float64)
    result = token_logprobs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        target=target,
        temperature=temperature,
        chunking=chunking,
        with_entropy=True,
    )
    whole = torch.log_softmax((hidden @ weight.T + bias) / temperature, dim=1)
    torch.testing.assert_close(result.logprobs, whole.gather(1, target[:, None])[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(result.entropy, -(whole.exp() * whole).sum(1), rtol=0, atol=1e-12)
    ours = torch.autograd.grad((slope * result.logprobs).sum(), (hidden, weight, bias))
    expected = torch.autograd.grad((slope * whole.gather(1, target[:, None])[:, 0]).sum(), (hidden, weight, bias))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunking", CHUNKINGS[:1] + CHUNKINGS[3:4])
def test_gradients_are_those_of_finite_differences(chunking: Chunking) -> None:
    hidden, weight, bias, target = problem()

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return token_logprobs(
            hidden=hidden,
            weight=weight,
            bias=bias,
            target=target,
            temperature=0.8,
            chunking=chunking,
            with_entropy=False,
        ).logprobs

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))


def test_logits_far_from_zero_neither_overflow_nor_lose_the_entropy() -> None:
    # Two tokens at 1000 and one at -1000: the chosen one has probability 1/2, the entropy is ln 2.
    result = token_logprobs(
        hidden=torch.ones(1, 1),
        weight=torch.tensor([[1000.0], [-1000.0], [1000.0]]),
        bias=None,
        target=torch.tensor([2]),
        temperature=1.0,
        chunking=Chunking(1, 1),
        with_entropy=True,
    )
    assert result.entropy is not None
    assert result.logprobs.item() == pytest.approx(-math.log(2))
    assert result.entropy.item() == pytest.approx(math.log(2))


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    hidden, weight, _, target = problem(torch.bfloat16)
    result = token_logprobs(
        hidden=hidden,
        weight=weight,
        bias=None,
        target=target,
        temperature=1.0,
        chunking=Chunking(3, 4),
        with_entropy=True,
    )
    logits = (hidden @ weight.T).float()
    expected = torch.log_softmax(logits, dim=1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(result.logprobs, expected, rtol=0, atol=1e-5)
    result.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_a_head_shares_the_parameters_of_the_projection_and_still_gives_logits() -> None:
    linear = torch.nn.Linear(5, 11)
    head = LogprobHead.sharing(linear)
    inputs = torch.randn(2, 3, 5)
    assert head.weight is linear.weight
    torch.testing.assert_close(head(inputs), linear(inputs))
