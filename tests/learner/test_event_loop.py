"""The learner's parts as its configuration makes them, and settings that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from learner.algorithms.preset import Preset
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.registry import ALGORITHMS, STREAMED
from learner.config import LearnerConfig, RolloutConfig
from learner.event_loop import commit_limit_s, draws_of, group_filter, priors_of, publisher_options
from learner.leases.filters import GroupFilter
from learner.leases.pass_rates import TaskCounts
from learner.leases.task_draws import TaskPlaces
from learner.leases.task_priors import PriorsFault
from learner.training.config import GuardConfig
from learner.training.guard import Guard
from services.process import WrongSettings


def learner_config(algo: str = "grpo", **rollouts: object) -> LearnerConfig:
    return LearnerConfig.model_validate({"model": "m", "algo": {"type": algo}, "rollouts": rollouts})


@pytest.mark.parametrize(("algo", "wanted"), [("grpo", False), ("dapo", True), ("online_dpo", True)])
def test_the_algorithm_says_whether_uniform_groups_are_left_out_where_the_configuration_is_silent(
    algo: str, wanted: bool
) -> None:
    assert group_filter(learner_config(algo)).drop_uniform is wanted
    if algo != "online_dpo":
        assert group_filter(learner_config(algo, drop_uniform_groups=not wanted)).drop_uniform is not wanted


def test_pairs_of_equal_rewards_are_refused() -> None:
    with pytest.raises(ValidationError, match="drop_uniform_groups is false, and algo online_dpo"):
        learner_config("online_dpo", drop_uniform_groups=False)


def test_the_range_and_the_rounds_are_those_of_the_configuration() -> None:
    config = learner_config(min_mean_reward=0.1, max_mean_reward=0.9, filter_rounds=3)
    assert group_filter(config) == GroupFilter(drop_uniform=False, min_mean_reward=0.1, max_mean_reward=0.9, rounds=3)


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        ({"min_mean_reward": 0.5, "max_mean_reward": 0.4}, "min_mean_reward is 0.5 and max_mean_reward 0.4"),
    ],
)
def test_filters_that_let_nothing_pass_are_refused(rollouts: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RolloutConfig.model_validate(rollouts)


def test_a_group_of_one_has_a_spread_where_it_is_compared_with_a_greedy_answer() -> None:
    alone = {"drop_uniform_groups": True, "group_size": 1, "min_group_size": 1}
    with pytest.raises(ValidationError, match=r"drop_uniform_groups is true and rollouts\.group_size 1"):
        learner_config("ppo", **alone)
    assert group_filter(learner_config("remax", **alone)) == GroupFilter(drop_uniform=True, greedy_baseline=True)


@pytest.mark.parametrize(
    ("http", "token", "said"),
    [
        ({"port": 0}, "0123456789abcdef", "tree_token is set, and http.token is not"),
        ({"port": 0, "token": "of all"}, "short", "tree_token has fewer than 16 characters"),
    ],
)
def test_a_token_of_the_tree_that_protects_nothing_is_refused(http: dict[str, object], token: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LearnerConfig.model_validate({"model": "m", "http": http, "weights": {"tree_token": token}})


class Worst:
    """Two steps in a row of this kind were in no run of either demonstration that learned, at lag up to 4."""

    effective_sample_share = 0.13
    behavior_kl = 0.46
    mismatch_kl = 0.005
    importance_ratio_max = 160.0


def test_the_guard_is_on_and_leaves_a_healthy_run_alone() -> None:
    guard = Guard(GuardConfig(), max_lag=4)
    assert [change for _ in range(100) if (change := guard.observe(Worst(), lag=4)) is not None] == []
    assert guard.max_lag == 4


@pytest.mark.parametrize(
    ("algo", "training"),
    [
        ({"type": "grpo"}, {"reference": {"mode": "ema"}}),
        ({"type": "dpo", "loss": "simpo"}, {"reference": {"mode": "ema"}}),
        ({"type": "grpo"}, {"critic": {"warmup_steps": 1}}),
    ],
)
def test_settings_of_models_that_the_algorithm_does_not_have_are_refused(
    algo: dict[str, object], training: dict[str, object]
) -> None:
    (name,) = training
    given = {"model": "m", "algo": algo, "training": training, "data": {"path": "d.jsonl"}}
    with pytest.raises(ValidationError, match=f"training.{name} is set"):
        LearnerConfig.model_validate(given)


def test_settings_of_models_that_the_algorithm_has_are_taken() -> None:
    for algo, training in (
        ({"type": "grpo", "kl_coefficient": 0.1}, {"reference": {"mode": "ema"}}),
        ({"type": "online_dpo"}, {"reference": {"mode": "refresh"}}),
        ({"type": "ppo"}, {"critic": {"warmup_steps": 1}}),
    ):
        LearnerConfig.model_validate({"model": "m", "algo": algo, "training": training})


@pytest.mark.parametrize(("max_lag", "expected"), [(0, 0), (1, 1), (2, 1), (8, 4)])
def test_one_that_pulls_is_never_further_behind_than_the_bound_on_the_lag(max_lag: int, expected: int) -> None:
    config = LearnerConfig.model_validate({"model": "m", "max_lag": max_lag})
    assert publisher_options(config, 1).most_behind == expected


@pytest.mark.parametrize(
    ("weights", "expected"), [({}, 20.0 + 2 * 20.0), ({"commit_timeout_s": 7.0}, 7.0)], ids=["by size", "as it is set"]
)
def test_a_commit_has_the_time_that_the_model_s_bytes_take(
    weights: dict[str, object], expected: float, tmp_path: Path
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2_000_000_000)  # a hole, which takes no disk
    config = LearnerConfig.model_validate({"model": tmp_path, "weights": weights})
    assert commit_limit_s(config) == pytest.approx(expected)


def test_tasks_are_drawn_as_the_settings_say_and_again_so_by_the_next_learner(tmp_path: Path) -> None:
    given = {"by": "signal", "floor": 0.3, "candidates": 4, "half_life_steps": 2.0}
    config = LearnerConfig.model_validate(
        {"model": "m", "groups_per_step": 3, "run": {"directory": tmp_path, "name": "r"}, "rollouts": {"tasks": given}}
    )
    config.run.folder.mkdir(parents=True)
    lives = []
    for _ in range(2):
        draws = draws_of(config, may_write=lambda: None)(TaskPlaces(count=50), lambda lease_id: lease_id % 50)
        assert draws.cover(next_lease=0, end=2, at=0) == 3, "as many as a step has groups"
        lives.append([draws.task_of(lease_id) for lease_id in range(3)])
    assert lives[0] == lives[1]
    assert (config.run.folder / "task_draws.jsonl").exists()


def test_priors_are_read_from_their_file_at_the_start_and_by_no_evaluation_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    given = {"tasks": {"by": "signal", "priors": path, "prior_weight": 2.0}}
    run = {"directory": tmp_path, "name": "r"}
    config = LearnerConfig.model_validate({"model": "m", "run": run, "rollouts": given})
    config.run.folder.mkdir(parents=True)
    with pytest.raises(PriorsFault, match=r"rates\.jsonl cannot be read"):
        draws_of(config, may_write=lambda: None)
    alone = LearnerConfig.model_validate({"model": "m", "run": run, "rollouts": given, "evaluation": {"only": True}})
    assert priors_of(alone) is None
    path.write_text('{"task": 7, "passes": 2, "trials": 8}\n')
    draws = draws_of(config, may_write=lambda: None)(TaskPlaces(count=50), lambda lease_id: lease_id % 50)
    draws.cover(next_lease=0, end=1, at=0)
    assert draws.rates.known(at=0) == [(7, TaskCounts(0.5, 1.5, 0))]


def test_settings_of_draws_are_refused_where_none_are_made() -> None:
    with pytest.raises(ValidationError, match='count with by = "signal" only'):
        learner_config(tasks={"priors": "rates.jsonl"})
    with pytest.raises(ValidationError, match="prior_weight is 8 and priors is not set"):
        learner_config(tasks={"by": "signal", "prior_weight": 8})
    with pytest.raises(ValidationError, match='count with by = "signal" only'):
        learner_config(tasks={"candidates": 4})
    assert learner_config(tasks={"by": "order", "candidates": 16}) == learner_config()


@pytest.mark.parametrize(
    ("algo", "lag", "said"),
    [
        ({"type": "treerl"}, {}, "algo treerl compares the parts of a tree"),
        ({"type": "gigpo", "turn_rewards": True}, {}, "algo.turn_rewards is true"),
        ({"type": "hgpo", "turn_rewards": True}, {}, "algo.turn_rewards is true"),
        ({"type": "grpo", "turn_discount": 0.9}, {}, "algo.turn_discount is 0.9"),
        ({"type": "remax"}, {}, "the greedy answer of algo remax"),
        ({"type": "grpo"}, {"max_drops_per_lease": 0}, 'on_lag is "mask" and max_drops_per_lease 0'),
    ],
)
def test_old_tokens_do_not_leave_a_loss_that_needs_them(
    algo: dict[str, object], lag: dict[str, object], said: str
) -> None:
    def made(on_lag: str, *, algo: dict[str, object] = algo) -> LearnerConfig:
        return LearnerConfig.model_validate({"model": "m", "algo": algo, "lag": {"on_lag": on_lag, **lag}})

    assert made("wait").lag.on_lag == "wait"
    with pytest.raises(ValidationError, match=said):
        made("mask")


def of_turns(*, name: str) -> Preset:
    """An own algorithm whose Preset has what `name` says."""
    said: dict[str, Any] = {name: True}
    return replace(GrpoConfig().preset(), name="mine", **said)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("turn_rewards", "it has turn_rewards, and of turns whose tokens are too old the last one"),
        ("turn_discounts", "it has turn_discounts, and of turns"),
        ("whole_trajectories", "it has whole_trajectories"),
    ],
)
def test_old_tokens_do_not_leave_an_own_loss_whose_preset_needs_them(named: str, said: str) -> None:
    def made(on_lag: str, name: str = named) -> LearnerConfig:
        algo = {"type": "custom", "path": f"{__name__}:of_turns", "options": {"name": name}}
        return LearnerConfig.model_validate({"model": "m", "algo": algo, "lag": {"on_lag": on_lag}})

    assert made("mask", "samples_policy").preset().name == "mine"
    assert made("wait").preset().whole_only
    with pytest.raises(WrongSettings, match=f"the Preset mine of algo custom needs whole trajectories: {said}"):
        made("mask").preset()


@pytest.mark.parametrize(
    "given",
    [
        *({"type": name} for name, made in ALGORITHMS.items() if made in STREAMED and name != "gdpo"),
        {"type": "gigpo", "turn_rewards": True},
        {"type": "hgpo", "turn_rewards": True},
        {"type": "grpo", "turn_discount": 0.9},
    ],
)
def test_presets_need_whole_trajectories_where_their_settings_say_so(given: dict[str, object]) -> None:
    algo = ALGORITHMS[str(given["type"])].model_validate(given)
    assert bool(algo.preset().whole_only) == bool(algo.whole_only)


@pytest.mark.parametrize("algo", ["grpo", "gigpo", "hgpo", "ppo"])
def test_old_tokens_may_leave_other_losses(algo: str) -> None:
    config = LearnerConfig.model_validate({"model": "m", "algo": {"type": algo}, "lag": {"on_lag": "mask"}})
    assert config.lag.on_lag == "mask"
