import math

import pytest
import torch

from learner.algorithms import ratios
from tests.learner.algorithms.differences import doubles


def test_a_ratio_passes_the_gradient_of_its_numerator_and_none_of_its_denominator() -> None:
    numerator, denominator = doubles(-1).requires_grad_(), doubles(-1 - math.log(3)).requires_grad_()
    ratio = ratios.ratio(numerator=numerator, denominator=denominator)
    slopes = torch.autograd.grad(ratio.sum(), (numerator, denominator), allow_unused=True)
    assert slopes[0] is not None
    assert slopes[0].tolist() == pytest.approx([3])
    assert slopes[1] is None


def test_a_ratio_is_bounded_by_twenty_nats_either_way_and_is_one_between_two_impossible_tokens() -> None:
    ratio = ratios.ratio(
        numerator=doubles(0, -1000, -math.inf, -1), denominator=doubles(-1000, 0, -math.inf, -math.inf)
    )
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1, math.exp(20)])
