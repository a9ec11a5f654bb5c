"""Demonstrations are drawn by the seed and the step's number alone."""

import numpy as np

from learner.data.demonstrations import Demonstrations
from learner.training.batch import TrainSequence


def demonstrations(count: int, *, per_step: int, seed: int = 0) -> Demonstrations:
    examples = [
        TrainSequence.supervised(token_ids=np.array([7, number], np.int32), loss_mask=np.array([False, True]))
        for number in range(count)
    ]
    return Demonstrations(examples, per_step=per_step, seed=seed)


def drawn(given: Demonstrations, version: int) -> list[int]:
    return [int(each.token_ids[1]) for each in given.of_step(version)]


def test_a_learner_that_starts_again_at_any_step_draws_what_the_first_one_drew() -> None:
    first = demonstrations(10, per_step=3)
    in_order = [drawn(first, version) for version in range(9)]
    assert [drawn(demonstrations(10, per_step=3), version) for version in reversed(range(9))] == in_order[::-1]
    assert len(first) == 10


def test_each_comes_once_before_any_comes_again_and_then_in_another_order() -> None:
    seen = [number for version in range(10) for number in drawn(demonstrations(10, per_step=3), version)]
    epochs = [seen[start : start + 10] for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_draws_others() -> None:
    assert drawn(demonstrations(10, per_step=3), 4) != drawn(demonstrations(10, per_step=3, seed=1), 4)


def test_a_file_of_fewer_than_a_step_takes_is_gone_through_several_times() -> None:
    assert sorted(drawn(demonstrations(2, per_step=6), 0)) == [0, 0, 0, 1, 1, 1]
