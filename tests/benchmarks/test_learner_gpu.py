"""The benchmark of the learner, tiny and on whatever device is here; and its arithmetic by hand."""

import numpy as np
import pytest

from benchmarks.learner_gpu import Workload, flops, measure
from benchmarks.learner_shapes import SHAPES, QwenShape
from benchmarks.padded_training import padded_microbatches
from learner.training.batch import TrainSequence
from learner.training.ranks import CommandChannel


def test_both_ways_train_the_same_and_are_measured(commands: CommandChannel) -> None:
    workload = Workload(dtype="float32", pack_tokens=128, sequences=6, longest=64, steps=2, tflops=1.0)
    rows = measure(SHAPES["tiny"], workload, commands=commands)
    assert [row.way for row in rows] == ["learner", "padded"]
    assert rows[0].step_tokens == rows[1].step_tokens > 0
    assert rows[0].first_loss == pytest.approx(rows[1].first_loss, abs=1e-3)
    for row in rows:
        assert row.mfu is not None
        assert row.mfu > 0
        assert row.tokens_per_s == pytest.approx(row.step_tokens / row.step_s)


def test_arithmetic_is_that_of_the_products_and_of_half_of_the_attention() -> None:
    shape = QwenShape("s", hidden=4, layers=2, heads=2, key_value_heads=1, intermediate=3, vocabulary=5)
    # A layer: query and output 2 x 16, key and value 2 x 4 x 2, three matrices of 12: 84. Two of them and 4 x 5: 188.
    assert shape.matrix_weights == 188
    # Three tokens and one: forward 2 x 188 x 4 + 2 x 2 layers x 4 x (9 + 1) = 1504 + 160; with backward three times.
    assert flops(shape, [3, 1]) == 3 * 1664


def test_a_padded_microbatch_holds_no_more_with_its_padding_than_a_row() -> None:
    def sequence(length: int) -> TrainSequence:
        return TrainSequence.supervised(token_ids=np.zeros(length, dtype=np.int32), loss_mask=np.arange(length) > 0)

    parts = padded_microbatches([sequence(length) for length in (3, 4, 5, 9, 2)], most_tokens=12)
    # 3 and 4 make 2 x 4; with 5 it would be 3 x 5. 5 and 9 would be 2 x 9. 9 and 2 would be 2 x 9.
    assert [[len(row.token_ids) for row in part] for part in parts] == [[3, 4], [5], [9], [2]]
