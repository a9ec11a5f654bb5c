"""Terms of several adapters, all at once and one after another: the same numbers, forward and back."""

import pytest
import torch
from torch import Tensor

from learner.training import low_rank
from learner.training.adapters import Adapter
from learner.training.low_rank import AdaptedRows, RowMasks, at_once, features_at_once, with_terms

WIDTH, OUT, TOKENS = 6, 5, 11
# Tokens 4 and 5 have no adapter on this layer.
ROWS = ((slice(0, 4), 2, 3.0), (slice(6, 9), 1, 0.5), (slice(9, 11), 4, 1.0))


def places() -> list[AdaptedRows]:
    random = torch.Generator().manual_seed(1)

    def factor(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64).requires_grad_()

    return [AdaptedRows(rows, Adapter(factor(rank, WIDTH), factor(OUT, rank), scale)) for rows, rank, scale in ROWS]


def inputs_and_output() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    made = [torch.randn(TOKENS, size, generator=random, dtype=torch.float64) for size in (WIDTH, OUT)]
    return made[0].requires_grad_(), made[1].requires_grad_()


def by_hand(output: Tensor, inputs: Tensor, adapted: list[AdaptedRows]) -> Tensor:
    parts = []
    for token in range(TOKENS):
        own = [each.pair for each in adapted if each.rows.start <= token < each.rows.stop]
        added = sum((pair.up @ (pair.down @ inputs[token]) * pair.scale for pair in own), torch.zeros(OUT))
        parts.append(output[token] + added)
    return torch.stack(parts)


@pytest.mark.parametrize("together", [True, False])
def test_terms_and_their_gradients_are_those_by_hand(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "at_once", lambda *_, **__: together)
    adapted = places()
    inputs, output = inputs_and_output()
    leaves = [inputs, output, *(factor for each in adapted for factor in (each.pair.down, each.pair.up))]
    weight = torch.arange(TOKENS * OUT, dtype=torch.float64).view(TOKENS, OUT).sin()
    expected = by_hand(output, inputs, adapted)
    made = with_terms(output, inputs, adapted, RowMasks())
    torch.testing.assert_close(made, expected)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad((made * weight).sum(), leaves), wanted)


def test_features_of_all_are_zero_outside_of_an_adapters_rows() -> None:
    inputs, output = inputs_and_output()
    features, ups = features_at_once(inputs, places(), RowMasks())
    assert features[4:6].count_nonzero() == 0
    torch.testing.assert_close(output + features @ ups.T, by_hand(output, inputs, places()))


def test_in_bfloat16_terms_at_once_have_the_scale_that_they_have_one_after_another() -> None:
    random = torch.Generator().manual_seed(3)
    tokens, width, rank, scale = 64, 96, 24, 32 / 24
    adapted = [
        AdaptedRows(
            rows, Adapter(torch.randn(rank, width, generator=random), torch.randn(width, rank, generator=random), scale)
        )
        for rows in (slice(0, 32), slice(32, 64))
    ]
    inputs = torch.randn(tokens, width, generator=random).bfloat16()
    exact = torch.cat([inputs[each.rows].float() @ each.pair.down.T @ each.pair.up.T * scale for each in adapted])
    features, ups = features_at_once(inputs, adapted, RowMasks())
    for made in (with_terms(torch.zeros_like(inputs), inputs, adapted, RowMasks()), features @ ups.T):
        assert made.dtype == torch.bfloat16
        assert (made.float() * exact).sum() / exact.square().sum() == pytest.approx(1.0, abs=5e-4)


def test_a_row_is_computed_at_once_up_to_so_many_products() -> None:
    ranks = sum(rank for _, rank, _ in ROWS)
    assert at_once(places(), TOKENS, WIDTH + OUT, most=TOKENS * (WIDTH + OUT) * ranks)
    assert not at_once(places(), TOKENS, WIDTH + OUT, most=TOKENS * (WIDTH + OUT) * ranks - 1)
    assert not at_once(places()[:1], TOKENS, WIDTH + OUT)


def test_masks_are_made_once_for_layers_with_the_same_adapters() -> None:
    masks, (inputs, _) = RowMasks(), inputs_and_output()
    assert masks.of(places(), inputs) is masks.of(places(), inputs)
    assert masks.of(places()[1:], inputs).shape == (TOKENS, 5)
