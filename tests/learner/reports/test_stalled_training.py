"""Training that gets nowhere: what is said of it once, and of which algorithms."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.reports.run_records import Records
from learner.reports.stalled_training import Doubts
from tests.learner.reports.test_run_records import record, step_metrics, two_groups


def doubts_of(**changes: Any) -> list[list[str]]:
    """Doubts after each of 45 steps."""
    doubts = Doubts()
    return [doubts.step(record(step, **changes)) for step in range(1, 46)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"uniform_groups_share": 1.0}, "the rewards of each group were all equal"),
        ({"uniform_groups_share": 0.5, "reward_mean": 0.25}, "the mean reward has been 0.25 in the last 20 steps"),
        ({"truncated_share": 1.0, "reward_std": 0.3}, "cut off at their last permitted token"),
    ],
)
def test_training_that_gets_nowhere_is_told_once_with_what_to_try(changes: dict[str, Any], said: str) -> None:
    lines = doubts_of(**changes)
    assert all(not line for line in lines[:19])
    assert sum(said in text for line in lines for text in line) == 1


@pytest.mark.parametrize("truncated", [0.2, 1.0])
def test_training_that_goes_on_is_not_doubted(truncated: float) -> None:
    """Short answers that are cut off and rise all the same want no longer ones."""
    doubts = Doubts()
    steps = [
        record(step, reward_mean=step / 100, truncated_share=truncated, uniform_groups_share=0.9) for step in range(60)
    ]
    assert [text for step in steps for text in doubts.step(step)] == []


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"type": "grpo"}, "the rewards of each group were all equal"),
        ({"type": "reinforce_pp", "group_baseline": True}, "the rewards of each group were all equal"),
        ({"type": "ppo"}, None),
        ({"type": "rae"}, None),
        ({"type": "remax"}, None),
        ({"type": "reinforce_pp"}, None),
        ({"type": "opd"}, None),
    ],
)
def test_equal_rewards_of_a_group_are_told_of_algorithms_that_compare_them(
    algorithm: dict[str, Any], said: str | None
) -> None:
    """A group of one, which is right for some, is always uniform."""
    adapter: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
    algo = adapter.validate_python(algorithm)
    doubts = Doubts(compares_in_group=algo.compares_in_group, learns_from_rewards=algo.learns_from_rewards)

    lines = [
        line
        for step in range(1, 46)
        for line in doubts.step(record(step, uniform_groups_share=1.0, reward_mean=step / 100))
    ]

    assert len(lines) == (0 if said is None else 1)
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("doubts", "said"),
    [
        (Doubts(compares_in_group=False), "the mean reward has been 0.25 in the last 20 steps"),
        (Doubts(learns_from_rewards=False), None),
    ],
)
def test_rewards_that_stand_still_are_told_of_algorithms_that_learn_from_them(
    doubts: Doubts, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Records(folder=tmp_path, total_steps=90, doubts=doubts) as records:
        for step in range(1, 25):
            one = record(step, uniform_groups_share=1.0, reward_mean=0.25)
            records.step(one, step_metrics(), two_groups())
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == (0 if said is None else 1)
    assert said is None or said in warnings[0]
