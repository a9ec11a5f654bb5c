"""Refusals of an evaluation by itself before it begins; the rest needs the real processes."""

from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.evaluate import EvaluationFailed, _compared, _report, evaluate_alone
from learner.evaluation.config import EvaluationConfig
from learner.evaluation.judging import read_against
from learner.evaluation.results import Evaluation, NotComparable, read_report, result_of, write_report
from services.process import Stop
from tests.learner.evaluation.judged_pairs import judging, tasks


def settings(folder: Path, **evaluation: object) -> LearnerConfig:
    return LearnerConfig(model=folder, evaluation=EvaluationConfig.model_validate({"only": True, **evaluation}))


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


async def test_a_judge_that_is_not_there_is_told_of_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    async with judging(verifier="nobody") as (judge, _):
        with pytest.raises(NotComparable, match="'nobody' is none of its verifiers"):
            await evaluate_alone(settings(tmp_path, against=tmp_path / "answers.jsonl", judge=judge), Stop())


@pytest.mark.parametrize("name", ["earlier.json", "answers.jsonl"])
async def test_an_evaluation_is_judged_against_an_earlier_one_and_against_answers(tmp_path: Path, name: str) -> None:
    def evaluation(completion: str) -> Evaluation:
        samples = tasks({0: (completion,), 1: (completion,)})
        result = result_of(samples, version=0, failed=0, sampled_by=(0, 0), success=1.0, ks=(1,))
        return Evaluation(environment="addition", result=result, tasks=samples)

    against = tmp_path / name
    async with judging() as (judge, _):
        config = settings(tmp_path, against=against, judge=judge)
        write_report(_report(config, evaluation("xx")), tmp_path / "earlier.json")
        (tmp_path / "answers.jsonl").write_text(
            '{"prompt": "task 0", "completion": "xxxx"}\n{"prompt": "task 1", "completion": "x"}\n'
        )
        report = await _compared(
            _report(config, evaluation("xxx")), evaluation("xxx"), read_against(against),
            settings=config.evaluation, against=against,
        )  # fmt: skip
    assert report.judged is not None
    assert (report.judged.win_rate, report.judged.tasks) == ((1.0, 2) if name == "earlier.json" else (0.5, 2))
    assert (report.comparison is None) == (name == "answers.jsonl"), "answers have no rewards"
    write_report(report, tmp_path / "found.json")
    assert read_report(tmp_path / "found.json") == report
