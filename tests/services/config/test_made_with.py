"""The record of what a run was made with, and what a resume with other settings meets."""

import json
import secrets
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from env_service.config import EnvServiceConfig
from generator.config import GeneratorConfig
from headway.checking import examine
from learner.config import LearnerConfig
from learner.journal.run_folder import changed_settings, refused_resume
from reward_service.config import RewardServiceConfig
from services.config import made_with
from services.config.models import ProcessConfig
from services.process import WrongSettings


def _config(tmp_path: Path, **settings: object) -> LearnerConfig:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    return LearnerConfig.model_validate({"model": model, **settings})


def test_the_record_holds_defaults_versions_and_the_command_and_no_secret(tmp_path: Path) -> None:
    config = _config(tmp_path, steps=7, http={"port": 7300, "token": "very-secret"})

    made_with.write(tmp_path, config.made_with())

    text = (tmp_path / made_with.FILE).read_text()
    record = json.loads(text)
    assert record["settings"]["steps"] == 7
    assert record["settings"]["rollouts.group_size"] == 8, "a default"
    assert record["settings"]["algo.type"] == "grpo"
    assert record["settings"]["http.token"] == "(a secret)"
    assert "very-secret" not in text
    assert {"headway", "python", "torch"} <= record["versions"].keys()
    assert record["command"]
    assert record["host"]["cores"] > 0


def test_the_cores_of_the_record_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5})
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert 0 < made_with.here()["host"]["cores"] <= 1


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"algo": {"type": "rloo"}}, "algo.type"),
        ({"algo": {"type": "grpo", "clip_low": 0.1}}, "algo.clip_low"),
        ({"rollouts": {"group_size": 4}}, "rollouts.group_size"),
        ({"groups_per_step": 3}, "groups_per_step"),
    ],
)
def test_a_resume_that_would_be_another_training_is_refused_unless_accepted(
    tmp_path: Path, changed: dict[str, object], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    made_with.write(tmp_path, _config(tmp_path).made_with())
    settings = _config(tmp_path, **changed).made_with()

    with pytest.raises(WrongSettings, match=rf"{key}: .* → .*--accept-changes"):
        changed_settings(tmp_path, settings, resume=True, accepted=False)
    accepted = changed_settings(tmp_path, settings, resume=True, accepted=True)

    assert key in {change.key for change in accepted}
    assert f"with another setting: {key}" in caplog.text
    assert changed_settings(tmp_path, settings, resume=False, accepted=False) == []


def test_max_lag_is_another_training_where_it_says_which_tokens_are_bounded(tmp_path: Path) -> None:
    def settings(lag: int, **reuse: object) -> dict[str, object]:
        return _config(tmp_path, max_lag=lag, reuse={"share": 0.5, **reuse}).made_with()

    made_with.write(tmp_path, settings(4))
    assert changed_settings(tmp_path, settings(3), resume=True, accepted=False)
    made_with.write(tmp_path, settings(4, max_lag=8))
    with pytest.raises(WrongSettings, match="max_lag: 4 → 3"):
        changed_settings(tmp_path, settings(3, max_lag=8), resume=True, accepted=False)


@pytest.mark.parametrize(("limit", "is_refused"), [(0.04, False), (0.1, True)])
def test_a_run_that_an_earlier_release_began_goes_on_with_defaults_of_settings_that_it_did_not_know(
    tmp_path: Path, limit: float, is_refused: bool
) -> None:
    reuse = {"share": 0.5, "max_lag": 8, "second_moment_limit": limit}
    config = _config(tmp_path, reuse=reuse)
    known = {key: value for key, value in config.made_with().items() if not key.endswith("second_moment_limit")}
    made_with.write(tmp_path, known)
    refused = refused_resume(tmp_path, config.made_with(), usual=made_with.at_defaults(config))
    assert ("second_moment_limit: null → 0.1" in refused) == bool(refused) == is_refused


def test_a_check_refuses_such_a_resume_before_anything_is_started(tmp_path: Path) -> None:
    run = {"name": "one", "directory": tmp_path}
    (tmp_path / "one").mkdir()
    made_with.write(tmp_path / "one", _config(tmp_path, run=run).made_with())

    def said(**more: object) -> str:
        config = _config(tmp_path, run=run, resume=True, rollouts={"group_size": 4}, **more)
        return "\n".join(examine({"learner": config}, elsewhere=False).faults)

    assert f"[learner] resume: the run in {tmp_path / 'one'} was made with other settings: " in said()
    assert "rollouts.group_size: 8 → 4" in said()
    assert "was made with other settings" not in said(accept_changes=True)


def test_another_setting_that_leaves_training_what_it_is_is_said_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made_with.write(tmp_path, _config(tmp_path).made_with())
    settings = _config(tmp_path, steps=200, resume=True).made_with()

    changes = changed_settings(tmp_path, settings, resume=True, accepted=False)
    made_with.write(tmp_path, settings, changes=changes)

    assert "steps: 100 → 200" in caplog.text
    record = made_with.read(tmp_path)
    assert record["changes"] == ["steps: 100 → 200"], "resume itself is no difference"
    assert len(record["former_starts"]) == 1


def test_the_same_model_in_another_place_is_the_same_model(tmp_path: Path) -> None:
    made_with.write(tmp_path, _config(tmp_path).made_with())
    (tmp_path / "elsewhere").mkdir()

    moved = _config(tmp_path / "elsewhere").made_with()
    assert changed_settings(tmp_path, moved, resume=True, accepted=False) == []

    (tmp_path / "elsewhere/model/config.json").write_text('{"hidden_size": 9}')
    other = LearnerConfig.model_validate({"model": tmp_path / "elsewhere/model"}).made_with()
    with pytest.raises(WrongSettings, match="model_fingerprint"):
        changed_settings(tmp_path, other, resume=True, accepted=False)


def test_another_chat_template_is_another_training_and_the_same_one_in_another_file_is_not(tmp_path: Path) -> None:
    def settings(name: str, text: str) -> dict[str, object]:
        (tmp_path / name).write_text(text)
        return _config(tmp_path, run={"chat_template": tmp_path / name}).made_with()

    made_with.write(tmp_path, settings("first.jinja", "{{ messages }}"))

    moved = settings("second.jinja", "{{ messages }}")
    assert changed_settings(tmp_path, moved, resume=True, accepted=False) == []
    for other in (settings("third.jinja", "{{ messages }}."), _config(tmp_path).made_with()):
        with pytest.raises(WrongSettings, match="template_fingerprint"):
            changed_settings(tmp_path, other, resume=True, accepted=False)


def test_a_run_of_an_earlier_release_can_be_resumed(tmp_path: Path) -> None:
    assert changed_settings(tmp_path, _config(tmp_path).made_with(), resume=True, accepted=False) == []


def _others(tmp_path: Path, **settings: object) -> dict[str, ProcessConfig]:
    model = _config(tmp_path).model
    environment = {"name": "sums", "source": "jsonl", "train_file": tmp_path / "tasks.jsonl", **settings}
    given = {"model": model, "environments": [environment], "generator_token": "very-secret"}
    return {"env-service": EnvServiceConfig.model_validate(given)}


def test_the_record_has_the_settings_of_the_processes_that_were_started_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(*, resume: bool, **settings: object) -> None:
        for name, value in made_with.handed_over(_others(tmp_path, **settings), ["headway", "up", "x.toml"]).items():
            monkeypatch.setenv(name, value)
        learner = _config(tmp_path).made_with()
        changes = changed_settings(tmp_path, learner, resume=resume, accepted=False)
        made_with.write(tmp_path, learner, changes=changes)

    start(resume=False)
    record = made_with.read(tmp_path)
    assert record["started_by"] == ["headway", "up", "x.toml"]
    assert record["beside"]["env-service.environments.sums.source"] == "jsonl"
    assert record["beside"]["env-service.capacity"] == 64, "a default"
    assert record["beside"]["env-service.generator_token"] == "(a secret)"
    assert "very-secret" not in (tmp_path / made_with.FILE).read_text()
    assert not [key for key in record["beside"] if ".run." in key], "as they are in the learner's"

    start(resume=True, chat=False)
    assert made_with.read(tmp_path)["changes"] == ["env-service.environments.sums.chat: true → false"]
    assert "goes on with another setting: env-service.environments.sums.chat" in caplog.text


def test_what_no_environment_can_hold_is_left_out(tmp_path: Path) -> None:
    assert made_with.handed_over(_others(tmp_path), [secrets.token_hex(200_000)]) == {}


def test_what_to_type_to_go_on_is_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/learner", "--config", "my run.toml", "--resume", "true"])
    assert made_with.to_go_on() == "learner --config 'my run.toml' --resume true"
    assert not made_with.is_handed_over()
    for name, value in made_with.handed_over(_others(tmp_path), ["headway", "up", "x.toml"]).items():
        monkeypatch.setenv(name, value)
    assert made_with.to_go_on() == "headway up x.toml --resume"
    assert made_with.is_handed_over()


def test_the_git_state_is_that_of_the_project_wherever_it_is_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.toml").touch()
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for words in (("init", "-q"), ("add", "run.toml"), (*who, "commit", "-qm", "begin")):
        subprocess.run(["git", "-C", str(project), *words], check=True)
    (project / "run.toml").write_text("[learner]\n")
    monkeypatch.chdir(tmp_path)
    for given in (["--config", "project/run.toml"], ["--config=project/run.toml"]):
        monkeypatch.setattr("sys.argv", ["learner", *given])
        made_with.write(tmp_path, {})
        git = made_with.read(tmp_path)["git"]
        assert git["changed_files"] == 1
        assert len(git["commit"]) == 40


def test_no_token_of_a_command_line_is_kept_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--http.token", "a1", "--env-service.generator-token=a2", "--weights.probe-tokens", "64", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/learner", *words])
    monkeypatch.setenv(*next(iter(made_with.handed_over({}, ["headway", "up", *words]).items())))
    made_with.write(tmp_path, {}, differs=[], changes=[])

    hidden = ["--http.token", made_with.SECRET, f"--env-service.generator-token={made_with.SECRET}", *words[3:]]
    record = made_with.read(tmp_path)
    assert record["command"] == ["learner", *hidden]
    assert record["started_by"] == ["headway", "up", *hidden]
    assert "a1" not in made_with.to_go_on()
    monkeypatch.delenv(made_with._HANDED_OVER)
    assert "a2" not in made_with.to_go_on()


def test_no_secret_in_a_table_of_a_command_line_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teachers = '[{"name": "t", "token": "abc", "url": "http://t"}]'
    nested = '{"http": {"token": "abc", "port": 1}, "token_file": "kept", "token": null}'
    plain = '[{"name": "as it was",  "url":"http://t"}]'
    words = ["--teachers", teachers, f"--learner={nested}", "--teachers", plain, "--alerts.webhook", "http://abc", "[x"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/learner", *words])
    made_with.write(tmp_path, {}, differs=[], changes=[])

    command = made_with.read(tmp_path)["command"]
    assert "abc" not in (tmp_path / made_with.FILE).read_text()
    assert json.loads(command[2]) == [{"name": "t", "token": made_with.SECRET, "url": "http://t"}]
    flag, _, value = command[3].partition("=")
    assert (flag, json.loads(value)) == (
        "--learner", {"http": {"token": made_with.SECRET, "port": 1}, "token_file": "kept", "token": None}
    )  # fmt: skip
    assert command[4:] == ["--teachers", plain, "--alerts.webhook", made_with.SECRET, "[x"]


def _secrets(config: type[BaseModel]) -> set[str]:
    """The names of all secret settings of a config and of the tables in it."""
    found: set[str] = set()
    for name, field in config.model_fields.items():
        for part in _parts(field.annotation):
            if part is SecretStr:
                found.add(name)
            elif isinstance(part, type) and issubclass(part, BaseModel):
                found |= _secrets(part)
    return found


def _parts(annotation: object) -> list[object]:
    return [annotation, *(part for each in typing.get_args(annotation) for part in _parts(each))]


@pytest.mark.parametrize("config", [LearnerConfig, GeneratorConfig, EnvServiceConfig, RewardServiceConfig])
def test_the_names_of_secrets_are_known_as_such(config: type[BaseModel]) -> None:
    found = _secrets(config)
    assert found
    assert [name for name in found if not made_with._SECRET_KEY.fullmatch(name)] == []
