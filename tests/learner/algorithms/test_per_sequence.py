import torch

from learner.algorithms.ratios import sequence_lengths, sequence_means, sequence_sums
from tests.learner.algorithms.differences import doubles


def test_sums_and_means_go_to_the_sequence_that_each_token_names() -> None:
    values, sequences = doubles(1, 2, 4, 8), torch.tensor([0, 2, 0, 2])
    assert sequence_sums(values=values, sequences=sequences, count=3).tolist() == [5, 0, 10]
    assert sequence_lengths(sequences=sequences, count=3).tolist() == [2, 0, 2]
    # Sequence 1 has no tokens: 0, not NaN.
    assert sequence_means(values=values, sequences=sequences, count=3).tolist() == [2.5, 0, 5]


def test_sums_and_means_pass_gradients_to_the_tokens() -> None:
    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sequences = torch.tensor([0, 2, 0, 2])
    for function in (sequence_sums, sequence_means):
        assert torch.autograd.gradcheck(
            lambda leaf, function=function: function(values=leaf, sequences=sequences, count=3), (values,)
        )
