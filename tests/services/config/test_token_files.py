"""Secrets that are given as files: in every source of settings, for every process."""

import re
from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from generator.config import GeneratorConfig
from learner.config import LearnerConfig
from reward_service.config import RewardServiceConfig
from services.config.models import ProcessConfig, help_text, load_config
from services.config.options import schema_of
from services.config.sources import ConfigError
from services.secret_files import write_secret

MODELS: dict[str, type[ProcessConfig]] = {
    "learner": LearnerConfig,
    "generator": GeneratorConfig,
    "reward-service": RewardServiceConfig,
    "env-service": EnvServiceConfig,
}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write_secret(path, "from-a-mounted-file")
    return path


def load(*argv: str, **environ: str) -> LearnerConfig:
    return load_config(LearnerConfig, process="learner", argv=["--model", "m", *argv], environ=environ)


def token_of(config: LearnerConfig) -> str:
    assert config.http.token is not None
    return config.http.token.get_secret_value()


def test_a_token_is_read_from_the_file_that_any_source_names(token: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'[learner.http]\ntoken_file = "{token}"\n')
    assert token_of(load("--config", str(run))) == "from-a-mounted-file"
    assert token_of(load("--http.token-file", str(token))) == "from-a-mounted-file"
    assert token_of(load(HEADWAY_LEARNER__HTTP__TOKEN_FILE=str(token))) == "from-a-mounted-file"


def test_a_later_source_goes_before_an_earlier_one_in_either_form(token: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[learner.http]\ntoken = "from-the-config"\n')
    assert token_of(load("--config", str(run), HEADWAY_LEARNER__HTTP__TOKEN_FILE=str(token))) == "from-a-mounted-file"
    other = tmp_path / "other"
    other.write_text("from-the-command-line")
    other.chmod(0o600)
    assert token_of(load("--http.token-file", str(other), HEADWAY_LEARNER__HTTP__TOKEN="direct")) == other.read_text()


def test_both_forms_in_one_source_are_refused(token: Path) -> None:
    with pytest.raises(ConfigError, match=r"_FILE: environment HEADWAY_LEARNER__HTTP__TOKEN is set, too"):
        load(HEADWAY_LEARNER__HTTP__TOKEN="direct", HEADWAY_LEARNER__HTTP__TOKEN_FILE=str(token))


def test_a_token_that_others_can_read_is_refused(token: Path) -> None:
    token.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--http.token-file: .*lets others use it: chmod 600") as caught:
        load("--http.token-file", str(token))
    assert "from-a-mounted-file" not in str(caught.value)


@pytest.mark.parametrize("process", MODELS)
def test_every_secret_of_every_process_has_its_file(process: str) -> None:
    options = schema_of(MODELS[process]).options
    secrets = [key for key, option in options.items() if option.is_secret]
    assert "http.token" in secrets
    assert all(f"{key}_file" in options for key in secrets)
    assert "--http.token-file" in help_text(MODELS[process], process=process, argv=("--all",))


@pytest.mark.parametrize("process", MODELS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "a-name"])
def test_no_process_serves_other_machines_without_a_token(process: str, host: str, token: Path) -> None:
    model = [] if process == "reward-service" else ["--model", "m"]
    with pytest.raises(ConfigError, match=re.escape(f"host {host} can be reached from other machines")):
        load_config(MODELS[process], process=process, argv=[*model, "--http.host", host], environ={})
    argv = [*model, "--http.host", host, "--http.token-file", str(token)]
    load_config(MODELS[process], process=process, argv=argv, environ={})
