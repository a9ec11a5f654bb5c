"""The settings of a run as its folder keeps them: what differs from the defaults, and how a replay reads them again."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.command import export_of_run
from learner.config import LearnerConfig
from learner.leases.intake import TakenBatch
from learner.replay import sequences_in, taught_again
from learner.run_settings import config_of_run, settings_of_run
from learner.teachers.teachers import GroupScores, TeacherScores, TextRefused
from learner.training.batch import LagBoundBroken, sequences_of
from services.config import made_with
from services.process import WrongSettings
from tests.learner.samples import group, trajectory

NAMES = tuple(TypeAdapter(AlgorithmConfig).json_schema()["discriminator"]["mapping"])
_NEEDED: dict[str, dict[str, Any]] = {"custom": {"path": "mine:algo"}, "gdpo": {"components": {"right": 1.0}}}
FROM_FILES = ("sft", "rm", "dpo", "distill")


def config_of(algo: str, folder: Path, **more: Any) -> LearnerConfig:
    given: dict[str, Any] = {"type": algo} | _NEEDED.get(algo, {})
    data = {"data": {"path": "examples.jsonl"}} if algo in FROM_FILES else {}
    teachers = {"teachers": [{"name": "wise", "path": "teacher"}]} if algo == "opd" else {}
    tables = {"model": "model", "algo": given, "run": {"directory": folder, "name": "one"}, **data, **teachers, **more}
    return LearnerConfig.model_validate(tables)


@pytest.mark.parametrize("algo", NAMES)
def test_what_differs_from_the_defaults_is_what_was_given(algo: str, tmp_path: Path) -> None:
    found = set(made_with.differing(config_of(algo, tmp_path, steps=7)))
    own = {"algo.type"} if algo != "grpo" else set()
    assert {"model", "steps", *own} <= found
    assert {name for name in found if not name.startswith(("algo.", "run."))} <= {
        "model", "steps", "data.path", "teachers"
    }  # fmt: skip


@pytest.mark.parametrize("algo", [name for name in NAMES if name not in FROM_FILES])
def test_a_replay_has_the_settings_of_the_run(algo: str, tmp_path: Path) -> None:
    config = config_of(algo, tmp_path, steps=7, training={"optimizer": {"learning_rate": 3e-4}})
    (tmp_path / "one").mkdir()
    made_with.write(tmp_path / "one", config.made_with())
    again = settings_of_run(tmp_path / "one")
    assert made_with.settings_of(again) == made_with.settings_of(config)


@pytest.mark.parametrize(
    ("algo", "given"),
    [
        ("grpo", {"teachers": [{"name": "wise", "path": "t"}], "algo": {"type": "grpo", "teacher_weight": 0.5}}),
        ("opd", {"teachers": [{"name": "self", "policy": True, "average": 0.9}]}),
        ("grpo", {"demonstrations": {"path": "shown.jsonl"}}),
        ("grpo", {"algo": {"type": "grpo", "observation_weight": 0.5}}),
    ],
)
def test_a_replay_has_what_a_run_learnt_from_beside_its_rewards(
    algo: str, given: dict[str, Any], tmp_path: Path
) -> None:
    config = LearnerConfig.model_validate(
        {"model": "model", "run": {"directory": tmp_path, "name": "one"}, "algo": {"type": algo}, **given}
    )
    (tmp_path / "one").mkdir()
    made_with.write(tmp_path / "one", config.made_with())
    again = settings_of_run(tmp_path / "one")
    assert made_with.settings_of(again) == made_with.settings_of(config)


@pytest.mark.parametrize(
    "http",
    [
        {"host": "0.0.0.0", "port": 7300, "token": "a token that is long enough"},
        {"host": "localhost", "port": 7300},
        {"host": "127.0.0.1", "port": 7300, "max_body_bytes": 4096},
        {"host": "127.0.0.1", "port": 7399},
        {"host": "127.0.0.1", "port": 7300, "tls_cert_file": "cert.pem", "tls_key_file": "key.pem"},
    ],
)
def test_a_replay_and_an_export_serve_no_http_and_so_ask_for_nothing_of_it(
    http: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of("grpo", tmp_path, steps=7, http=http)
    (tmp_path / "one").mkdir()
    made_with.write(tmp_path / "one", config.made_with())
    for again in (config_of_run(tmp_path / "one"), settings_of_run(tmp_path / "one", changes=["algo.clip_high=0.3"])):
        assert (again.steps, again.http) == (7, LearnerConfig.model_fields["http"].default)


def test_secrets_and_keys_of_a_run_are_not_needed_to_replay_it(tmp_path: Path) -> None:
    config = config_of(
        "grpo", tmp_path, weights={"generator_token": "a secret"}, verdict={"webhook": "https://chat.example/hook"},
        evaluation={"judge": {"token": "a secret"}},
        trackers={"mlflow_url": "http://127.0.0.1:5000", "mlflow_token": "a secret"},
        leases={"address": "tcp://0.0.0.0:7301", "secret_key_file": "gone.key", "authorized_keys": "gone"},
    )  # fmt: skip
    (tmp_path / "one").mkdir()
    made_with.write(tmp_path / "one", config.made_with())
    again = settings_of_run(tmp_path / "one")
    assert (again.leases, again.weights.generator_token) == (config.leases, None)


def test_an_export_names_the_setting_that_is_wrong_and_the_release_only_if_it_is_another(tmp_path: Path) -> None:
    made_with.write(tmp_path, config_of("grpo", tmp_path).made_with())
    path = tmp_path / made_with.FILE
    made = json.loads(path.read_text())
    made["settings"] |= {"training.dtype": "float7"}

    def refusal(**changes: Any) -> str:
        path.write_text(json.dumps({**made, **changes}))
        with pytest.raises(WrongSettings) as caught:
            export_of_run(tmp_path, tmp_path / "out", merged=False)
        return str(caught.value)

    same = refusal()
    assert "made_with.json cannot be taken: training.dtype: Input should be" in same
    assert "release" not in same
    assert "is of another release, headway 0.0.7, and here" in refusal(versions={"headway": "0.0.7"})


def test_a_replay_has_the_epochs_of_a_run_and_not_beside_them_the_steps_that_they_came_to(tmp_path: Path) -> None:
    made_with.write(tmp_path, {**config_of("sft", tmp_path, data={"path": "d", "epochs": 2}).made_with(), "steps": 6})
    assert config_of_run(tmp_path).data.epochs == 2


def test_what_cannot_be_replayed_is_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(**more: Any) -> str:
        algo = more.pop("algo", "grpo")
        made_with.write(tmp_path, config_of(algo, tmp_path, **more).made_with())
        with pytest.raises(WrongSettings) as caught:
            settings_of_run(tmp_path)
        return str(caught.value)

    with pytest.raises(WrongSettings, match="expected the folder of a run"):
        settings_of_run(tmp_path / "nothing")
    assert "learnt from files (sft)" in refused(algo="sft")
    assert "kept no journal" in refused(checkpoint={"journal": False})
    elsewhere = [{"name": "wise", "urls": ["http://127.0.0.1:1"]}]
    assert "a teacher at http://127.0.0.1:1 taught" in refused(algo="opd", teachers=elsewhere)


def test_a_batch_of_the_log_is_trained_again_under_the_bound_of_its_time() -> None:
    """A resume may have lowered it since: what was trained then is a part of the history of the weights."""
    groups = (group(0, trajectory(2, 5), trajectory(5, 5)), group(1, trajectory(4, 5), trajectory(5, 5)))
    batch = TakenBatch(version=5, groups=groups, lags=(3, 1))
    preset = TypeAdapter(AlgorithmConfig).validate_python({"type": "grpo"}).preset()

    assert (batch.bound(2), batch.bound(4)) == (3, 4)
    again = replace(batch, lags=(3, 9), reused=1)
    assert (again.bound(2), again.bound_of_reused(2), again.bound_of_reused(16)) == (3, 9, 16)
    with pytest.raises(LagBoundBroken):
        sequences_of(groups, version=5, max_lag=2, preset=preset)
    assert len(sequences_of(groups, version=5, max_lag=batch.bound(2), preset=preset)) == 4


def test_a_step_that_the_policy_taught_is_replayed_as_it_was_taught_if_the_journal_says_how(tmp_path: Path) -> None:
    config = config_of("opd", tmp_path, teachers=[{"name": "self", "policy": True}])
    (tmp_path / "one").mkdir()
    made_with.write(tmp_path / "one", config.made_with())
    settings, preset = settings_of_run(tmp_path / "one"), config.preset()
    trainer: Any = SimpleNamespace(preset=preset)
    groups = (group(0, *[trajectory(4, 5)] * 3), group(1, trajectory(4, 5), trajectory(5, 5)))
    length = len(groups[0].trajectories[0].token_ids)
    said = TeacherScores(np.full(length, -2.0, np.float32), "1.3")
    scores = (said, said, TeacherScores.nothing(length, top=0))
    noted: dict[int, GroupScores | TextRefused] = {0: scores, 1: TextRefused("too long")}
    batch = TakenBatch(version=5, groups=groups, lags=(1, 1))
    step: Any = SimpleNamespace(version=5, read=lambda: batch, told=lambda: noted)

    as_taught = taught_again(step, settings, trainer)
    trained = [
        (bool(one.loss_mask.any()), one.taught, one.teacher_logprobs.min())
        for one in sequences_in(as_taught, settings, preset)
    ]
    assert trained == [*[(True, True, -2.0)] * 2, (True, False, 0.0), *[(False, False, 0.0)] * 2]
    assert as_taught.lags == [2, 2]
    del noted[1]
    with pytest.raises(WrongSettings, match=r"step 6 was not trained: .* what the policy said of lease 1 as"):
        taught_again(step, settings, trainer)
