"""What an evaluation by itself says before it begins; the rest needs the real processes."""

from pathlib import Path

import pytest

from learner.config import EvaluationConfig, LearnerConfig
from learner.evaluation.report import NotComparable
from learner.evaluation.standalone import EvaluationFailed, evaluate_alone
from services.process import Stop


def settings(folder: Path, **evaluation: Path) -> LearnerConfig:
    return LearnerConfig(model=folder, evaluation=EvaluationConfig(only=True, **evaluation))


async def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationFailed, match=r"model is no checkpoint; expected a folder checkpoint-<version>"):
        await evaluate_alone(settings(tmp_path, checkpoint=tmp_path / "model"), Stop())


async def test_a_checkpoint_that_is_not_whole_is_not_evaluated(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-00000004"
    folder.mkdir()
    with pytest.raises(EvaluationFailed, match=r"checkpoint-00000004 cannot be used: .*manifest\.json"):
        await evaluate_alone(settings(tmp_path, checkpoint=folder), Stop())


async def test_a_wrong_file_to_compare_with_is_told_of_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match=r"gone\.json"):
        await evaluate_alone(settings(tmp_path, against=tmp_path / "gone.json"), Stop())
