"""The settings of a run as its folder keeps them: what differs from the defaults, and how a replay reads them again."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.command import settings_of_run
from learner.config import LearnerConfig
from learner.leases.intake import TakenBatch
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
    with pytest.raises(LagBoundBroken):
        sequences_of(groups, version=5, max_lag=2, preset=preset)
    assert len(sequences_of(groups, version=5, max_lag=batch.bound(2), preset=preset)) == 4
