import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.training.logprobs import Chunking, TopTokens, token_logprobs, top_tokens

CHUNKINGS = [Chunking(100, 100), Chunking(3, 100), Chunking(100, 4), Chunking(2, 3), Chunking(1, 1)]


def best(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    count: int,
    temperature: float = 1.0,
    chunking: Chunking = CHUNKINGS[0],
) -> TopTokens:
    return top_tokens(hidden=hidden, weight=weight, bias=bias, count=count, temperature=temperature, chunking=chunking)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(7, 5, generator=generator, dtype=torch.float64),
        torch.randn(11, 5, generator=generator, dtype=torch.float64),
        torch.randn(11, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("count", [1, 4, 11])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_top_tokens_are_those_of_the_whole_distribution(chunking: Chunking, count: int, temperature: float) -> None:
    hidden, weight, bias = problem()
    found = best(hidden, weight, bias, count=count, temperature=temperature, chunking=chunking)
    expected, token_ids = torch.log_softmax((hidden @ weight.T + bias) / temperature, dim=1).topk(count)
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=1e-12)
    assert found.token_ids.tolist() == token_ids.tolist()
    assert found.token_ids.dtype == torch.int64


def test_the_top_two_of_four_are_those_worked_by_hand() -> None:
    # Logits ln 1, ln 4, ln 2 and ln 9: of 16 parts, token 3 has 9 and token 1 has 4.
    weight = torch.tensor([1.0, 4.0, 2.0, 9.0]).log()[:, None]
    found = best(torch.ones(1, 1), weight, count=2, chunking=Chunking(1, 3))
    assert found.token_ids.tolist() == [[3, 1]]
    assert found.logprobs[0].tolist() == pytest.approx([math.log(9 / 16), math.log(4 / 16)])


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.sampled_from([-2.0, 0.0, 1.0]), min_size=1, max_size=12),
    data=st.data(),
    chunk=st.integers(1, 13),
)
def test_among_equals_different_tokens_with_the_highest_logprobs_are_kept(
    logits: list[float], data: st.DataObject, chunk: int
) -> None:
    count = data.draw(st.integers(1, len(logits)))
    found = best(torch.ones(1, 1), torch.tensor(logits)[:, None], count=count, chunking=Chunking(1, chunk))
    token_ids = found.token_ids[0].tolist()
    assert len(set(token_ids)) == count
    assert [logits[token] for token in token_ids] == sorted(logits, reverse=True)[:count]
    whole = torch.log_softmax(torch.tensor(logits), dim=0)
    torch.testing.assert_close(found.logprobs[0], whole[found.token_ids[0]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_model_gives_its_own_top_tokens_the_logprobs_that_came_with_them(temperature: float) -> None:
    hidden, weight, bias = problem()
    chunking = Chunking(2, 3)
    found = best(hidden, weight, bias, count=5, temperature=temperature, chunking=chunking)
    result = token_logprobs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        target=found.token_ids[:, 0],
        candidates=found.token_ids,
        temperature=temperature,
        chunking=chunking,
        with_entropy=False,
    )
    assert result.candidates is not None
    torch.testing.assert_close(result.candidates, found.logprobs, rtol=0, atol=1e-12)
    assert result.entropy is None


def test_no_gradient_is_kept() -> None:
    hidden, weight, bias = problem()
    assert not best(hidden.requires_grad_(), weight.requires_grad_(), bias, count=3).logprobs.requires_grad


def test_no_tokens_have_no_top_tokens() -> None:
    hidden, weight, bias = problem()
    found = best(hidden[:0], weight, bias, count=3)
    assert found.token_ids.shape == found.logprobs.shape == (0, 3)
