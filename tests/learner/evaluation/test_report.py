"""The file of an evaluation by itself, its comparison with an earlier one, and its table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from learner.evaluation.results import (
    Evaluation,
    EvaluationReport,
    NotComparable,
    Sample,
    TaskSamples,
    compare,
    read_report,
    result_of,
    table,
    write_report,
)


def sample(reward: float) -> Sample:
    return Sample(completion="four\n", reward=reward, answer=None, length=4, truncated=False)


def evaluation(rewards: Mapping[int, Sequence[float]], *, environment: str = "addition") -> Evaluation:
    tasks = tuple(
        TaskSamples(task_index=index, prompt="2 + 2", samples=tuple(map(sample, each)))
        for index, each in rewards.items()
    )
    result = result_of(tasks, version=0, failed=1, sampled_by=(0, 0), success=1.0, ks=(1, 2))
    return Evaluation(environment=environment, result=result, tasks=tasks)


def report(made: Evaluation) -> EvaluationReport:
    return EvaluationReport(
        model=Path("models/a"),
        checkpoint=None,
        environment=made.environment,
        temperature=1.0,
        success_reward=1.0,
        result=made.result,
        comparison=None,
        tasks=made.tasks,
    )


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "evaluation.json"
    made = report(evaluation({0: (1.0, 0.0), 1: (0.5, 1.0)}))
    write_report(made, path)
    assert read_report(path) == made
    assert read_report(path).result.pass_at_k == {1: 0.5, 2: 1.0}


@pytest.mark.parametrize(("text", "named"), [("{", "Invalid JSON"), ('{"model": "a"}', "checkpoint: Field required")])
def test_another_file_is_refused_and_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(NotComparable, match=rf"other\.json is no evaluation of this release .*{named}.*headway eval"):
        read_report(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match=r"cannot be read: .*No such file.*gone\.json"):
        read_report(tmp_path / "gone.json")


def test_two_evaluations_are_compared_on_their_common_tasks() -> None:
    ours = evaluation({0: (1.0,), 1: (0.0,), 2: (1.0,), 5: (1.0,)})
    theirs = report(evaluation({0: (0.0,), 1: (0.0,), 2: (1.0, 0.0), 9: (1.0,)}))
    found = compare(ours, theirs, path=Path("b.json"))
    # Task 0 is won, 1 a tie, 2 a tie and a win: 1, 1/2 and 3/4.
    assert found.tasks == 3
    assert found.win_rate == pytest.approx((1 + 0.5 + 0.75) / 3)
    assert found.low < found.win_rate < found.high


def test_evaluations_of_other_tasks_are_not_compared() -> None:
    ours = evaluation({0: (1.0,)})
    with pytest.raises(NotComparable, match=r"b\.json is of environment 'chess', this evaluation of 'addition'"):
        compare(ours, report(evaluation({0: (1.0,)}, environment="chess")), path=Path("b.json"))
    with pytest.raises(NotComparable, match=r"b\.json has no task in common"):
        compare(ours, report(evaluation({1: (1.0,)})), path=Path("b.json"))


def test_the_table_by_hand() -> None:
    made = evaluation({0: (1.0, 0.0), 1: (1.0, 1.0)})
    comparison = compare(made, report(evaluation({0: (0.0,), 1: (0.0,)})), path=Path("b.json"))
    text = table(report(made).model_copy(update={"comparison": comparison}), path=Path("a.json"))
    lines = text.splitlines()
    assert lines[0] == "  evaluated    models/a"
    assert lines[1].startswith("  accuracy     75.0% (")
    assert lines[1].endswith(") on 2 held-out tasks of addition")
    assert "  pass@k       1: 75.0%  2: 100.0%" in lines
    assert "  completions  4, 4.0 tokens each, 0.0% truncated" in lines
    assert any(line.startswith("  win rate     87.5% (") and line.endswith("2 tasks against b.json") for line in lines)
    assert "  given up     1 tasks, which are in no number above" in lines
    assert lines[-1] == "  file         a.json"
