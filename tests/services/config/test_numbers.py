"""A number that is written as true or false."""

from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from learner.config import LearnerConfig
from services.config.models import load_config
from services.config.sources import ConfigError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = true", "[learner] steps: got true: expected a number"),
        ("devices = [0, true]", "[learner] devices: 1: got true: expected a number"),
        ("training.optimizer.learning_rate = false", "training.optimizer.learning_rate: got false: expected a number"),
        ('algo = { type = "grpo", clip_low = true }', "algo.clip_low: got true: expected a number"),
        ("http.port = true", "http.port: got true: expected a number"),
    ],
)
def test_true_is_no_number(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[learner]\nmodel = "m"\n{text}\n')

    with pytest.raises(ConfigError) as raised:
        load_config(LearnerConfig, process="learner", argv=["--config", str(tmp_path / "run.toml")], environ={})

    assert said in "\n".join(raised.value.problems)


def test_true_is_no_number_in_a_list_of_tables(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[env-service]\nmodel = "m"\n[[env-service.environments]]\nname = "sums"\nsource = "mine:World"\n'
        "rules = { max_turns = true }\noptions = { loud = true }\n"
    )

    with pytest.raises(ConfigError) as raised:
        load_config(EnvServiceConfig, process="env-service", argv=["--config", str(tmp_path / "run.toml")], environ={})

    assert "sums.rules.max_turns: got true: expected a number" in "\n".join(raised.value.problems)


def test_true_is_true_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[learner]\nmodel = "m"\nresume = true\n')

    argv = ["--config", str(tmp_path / "run.toml")]
    assert load_config(LearnerConfig, process="learner", argv=argv, environ={}).resume


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("leases = { timeout_s = inf }", "leases.timeout_s: got inf: expected a finite number"),
        ("rollouts = { min_mean_reward = nan }", "rollouts.min_mean_reward: got nan: expected a finite number"),
        ("training.optimizer.learning_rate = inf", "learning_rate: got inf: expected a finite number"),
        ('algo = { type = "grpo", clip_high = inf }', "algo.clip_high: got inf: expected a finite number"),
        ("seed = 99999999999999999999", "seed: got 99999999999999999999: expected less than"),
    ],
)
def test_a_number_that_nothing_can_be_counted_with_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[learner]\nmodel = "m"\n{text}\n')

    with pytest.raises(ConfigError) as raised:
        load_config(LearnerConfig, process="learner", argv=["--config", str(tmp_path / "run.toml")], environ={})

    assert said in "\n".join(raised.value.problems)


def test_a_seed_of_the_run_that_is_too_large_is_said_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(LearnerConfig, process="learner", argv=["--model", "m", "--run.seed", "20260101123456"], environ={})

    assert raised.value.problems == ("command line --run.seed: got '20260101123456': expected less than 4294967296",)
