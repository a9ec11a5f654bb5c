import pytest
from pydantic import ValidationError

from learner.training.config import OptimizerConfig
from learner.training.engine import learning_rate


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


def test_the_inverse_square_root_starts_at_the_peak_and_has_no_end() -> None:
    # Warm-up 3: update 3 is the 4th and the first at the peak; the 16th has sqrt(4/16), the 400th sqrt(4/400).
    config = OptimizerConfig(learning_rate=1.0, schedule="inverse_sqrt", warmup_updates=3)
    assert rates(config, [0, 3, 15, 399]) == pytest.approx([0.25, 1.0, 0.5, 0.1])
    assert rates(OptimizerConfig(learning_rate=1.0, schedule="inverse_sqrt"), [0, 3]) == pytest.approx([1.0, 0.5])


def test_wsd_rises_stays_and_falls_over_its_last_updates() -> None:
    # The fall takes updates 16 to 20: at 18 it is half done, half way from 1 to 0.2.
    config = OptimizerConfig(
        learning_rate=1.0, schedule="wsd", warmup_updates=1, total_updates=20, decay_updates=4, final_fraction=0.2
    )
    assert rates(config, [0, 1, 10, 16, 18, 20, 99]) == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_a_schedule_with_an_end_needs_one_and_another_refuses_it() -> None:
    with pytest.raises(ValidationError, match="total_updates"):
        OptimizerConfig(schedule="cosine")
    with pytest.raises(ValidationError, match="total_updates"):
        OptimizerConfig(total_updates=5)
    with pytest.raises(ValidationError, match="final_fraction"):
        OptimizerConfig(schedule="inverse_sqrt", final_fraction=0.5)


def test_wsd_needs_its_decay_and_the_others_refuse_it() -> None:
    with pytest.raises(ValidationError, match="decay_updates"):
        OptimizerConfig(schedule="wsd", total_updates=5)
    with pytest.raises(ValidationError, match="only wsd"):
        OptimizerConfig(schedule="linear", total_updates=5, decay_updates=2)
    with pytest.raises(ValidationError, match="do not fit"):
        OptimizerConfig(schedule="wsd", total_updates=5, decay_updates=4, warmup_updates=2)
