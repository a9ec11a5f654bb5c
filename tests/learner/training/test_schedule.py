import pytest
from pydantic import ValidationError

from learner.training.config import OptimizerConfig
from learner.training.schedule import learning_rate


def rates(config: OptimizerConfig, updates: list[int]) -> list[float]:
    return [learning_rate(config, update=update) for update in updates]


def test_the_rate_rises_to_its_peak_and_stays() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_updates=3)
    assert rates(config, [0, 1, 2, 3, 100]) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_and_cosine_fall_to_their_floor_and_stay_there() -> None:
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", total_updates=10, final_fraction=0.2)
    assert rates(linear, [0, 5, 10, 99]) == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = OptimizerConfig(learning_rate=1.0, schedule="cosine", total_updates=12, warmup_updates=2)
    assert rates(cosine, [2, 7, 12]) == pytest.approx([1.0, 0.5, 0.0])


def test_a_schedule_with_an_end_needs_one_and_another_refuses_it() -> None:
    with pytest.raises(ValidationError, match="total_updates"):
        OptimizerConfig(schedule="cosine")
    with pytest.raises(ValidationError, match="total_updates"):
        OptimizerConfig(total_updates=5)
