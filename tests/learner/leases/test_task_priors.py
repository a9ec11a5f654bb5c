"""Priors of the tasks' pass rates: how a file is read, how much it counts, and what becomes of it at a resume."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from learner.evaluation.results import Evaluation, Sample, TaskSamples, result_of, write_report
from learner.leases.pass_rates import TaskCounts
from learner.leases.run_rows import RunRows
from learner.leases.task_draws import DrawRules, TaskDraws, TaskPlaces
from learner.leases.task_order import TaskOrder
from learner.leases.task_priors import PriorsFault, TaskPriors, read_priors
from protocol.messages import TaskPart
from protocol.trajectories import TrajectoryGroup
from tests.learner.evaluation.test_report import report
from tests.learner.samples import group, trajectory

COUNT = 20


def lines(path: Path, *rows: Mapping[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one(task: object, passes: object, trials: object) -> dict[str, object]:
    return {"task": task, "passes": passes, "trials": trials}


def evaluated(path: Path, rewards: Mapping[int, Sequence[float]], *, prompt: str = "2 + 2") -> Path:
    """Writes what `headway eval` does, of samples of these rewards."""
    tasks = tuple(
        TaskSamples(
            task_index=index,
            prompt=prompt,
            samples=tuple(Sample(completion="4", reward=one, answer=None, length=1, truncated=False) for one in each),
        )
        for index, each in rewards.items()
    )
    result = result_of(tasks, version=0, failed=0, sampled_by=(0, 0), success=1.0, ks=(1,))
    write_report(report(Evaluation(environment="addition", result=result, tasks=tasks)), path)
    return path


def priors_of(path: Path, *, weight: float = 4.0, success_reward: float = 1.0) -> TaskPriors:
    return read_priors(path, weight=weight, success_reward=success_reward)


def draws_of(
    folder: Path | None, priors: TaskPriors | None, *, places: TaskPlaces | None = None, half_life: float | None = 2.0
) -> TaskDraws:
    return TaskDraws(
        places=places or TaskPlaces(count=COUNT),
        rules=DrawRules(candidates=8, floor=0.25, half_life_steps=half_life, ahead=4),
        plain=TaskOrder(count=COUNT, seed=0).task_index,
        rows=None if folder is None else RunRows(folder / "task_draws.jsonl", run="r"),
        priors=priors,
    )


def shape(draws: TaskDraws, task: int, *, at: int) -> tuple[float, float]:
    alpha, beta = draws.rates.shapes([task], at=at)
    return float(alpha[0]), float(beta[0])


def test_trials_count_up_to_the_weight_and_are_forgotten_as_what_was_seen_is(tmp_path: Path) -> None:
    """6 of 8 at a weight of 4 are 3 and 1, beside the 1 and 1 of every task; 1 of 2 stay 1 and 1. A half-life of 2
    steps after step 5 half of it is left: 1.5 and 0.5.
    """
    path = lines(tmp_path / "rates.jsonl", one(3, 6, 8), one(4, 1, 2), one(5, 2.5, 10))
    draws = draws_of(None, priors_of(path))
    assert shape(draws, 3, at=5) == (1.0, 1.0), "they count from where drawing begins"
    draws.cover(next_lease=0, end=0, at=5)
    assert shape(draws, 3, at=5) == (4.0, 2.0)
    assert shape(draws, 4, at=5) == (2.0, 2.0)
    assert shape(draws, 5, at=5) == (2.0, 4.0)
    assert shape(draws, 6, at=5) == (1.0, 1.0), "the file says nothing of it"
    assert shape(draws, 3, at=7) == (2.5, 1.5)
    draws.accepted(_rolled_out(3, 1.0, 0.0, 0.0), at=7)
    assert shape(draws, 3, at=7) == (3.5, 3.5)


def _rolled_out(task: int, *rewards: float, prompt: str = "") -> TrajectoryGroup:
    made = group(0, *(trajectory(0, reward=reward) for reward in rewards))
    return made.model_copy(update={"task_index": task, "prompt_text": prompt})


def test_an_evaluation_by_itself_is_read_with_the_success_of_this_run(tmp_path: Path) -> None:
    path = evaluated(tmp_path / "evaluation.json", {0: (1.0, 0.0), 7: (0.5, 1.0, 0.5, 0.0)})
    assert dict(priors_of(path).tried) == {0: (1.0, 2.0), 7: (1.0, 4.0)}
    easier = priors_of(path, success_reward=0.5)
    assert dict(easier.tried) == {0: (1.0, 2.0), 7: (3.0, 4.0)}
    assert easier.fingerprint != priors_of(path).fingerprint


def test_draws_follow_the_priors_before_anything_was_rolled_out(tmp_path: Path) -> None:
    """Tasks 0 to 3 are solved half of the time, all others never: Beta(501, 501) draws a p(1 − p) near 1/4, and
    Beta(1, 1001) one near 0.001. Of 8 candidates one of the four is there in 1 − 0.8^8 = 0.832 of the draws; the floor
    leaves 0.75 of the leases to draws, and gives 0.2 of its quarter: 0.75 · 0.832 + 0.25 · 0.2 = 0.674.
    """
    path = lines(tmp_path / "rates.jsonl", *(one(task, 500 * (task < 4), 1000) for task in range(COUNT)))
    shares = []
    for priors in (None, priors_of(path, weight=1000.0)):
        draws = draws_of(None, priors)
        draws.cover(next_lease=0, end=4000, at=0)
        shares.append(float(np.mean([draws.task_of(lease_id) < 4 for lease_id in range(4000)])))
    assert shares[0] == pytest.approx(0.2, abs=0.03)
    assert shares[1] == pytest.approx(0.674, abs=0.03)


def test_places_of_one_task_are_added_up_before_the_weight_bounds_them(tmp_path: Path) -> None:
    """Places 0, 2 and 4 are task 0: 2 of 2 and 2 of 6 are 4 of 8, at a weight of 4 so 2 and 2."""
    path = lines(tmp_path / "rates.jsonl", one(0, 2, 2), one(4, 2, 6))
    parts = (TaskPart(places=6, tasks=2), TaskPart(places=14, tasks=14))
    draws = draws_of(None, priors_of(path), places=TaskPlaces(count=COUNT, parts=parts))
    draws.cover(next_lease=0, end=0, at=0)
    assert draws.rates.known(at=0) == [(0, TaskCounts(2.0, 2.0, 0))]


def test_tasks_that_the_environment_has_not_are_left_out_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "rates.jsonl", one(19, 1, 2), one(20, 1, 2), one(31, 0, 2))
    draws = draws_of(None, priors_of(path))
    for _ in range(2):
        draws.cover(next_lease=0, end=1, at=0)
    assert [task for task, _ in draws.rates.known(at=0)] == [19]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"rollouts.tasks.priors: 2 of the 3 tasks in {path} are left out, first 20: the environment's training tasks "
        "are 0 to 19"
    )


def test_a_resume_draws_the_same_though_the_file_is_another_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "rates.jsonl", one(3, 4, 8), one(4, 8, 8))
    first = draws_of(tmp_path, priors_of(path))
    first.cover(next_lease=0, end=8, at=1)
    same = draws_of(tmp_path, priors_of(path))
    assert not caplog.records
    for later in (same, draws_of(tmp_path, None)):
        assert (
            later.rates.known(at=1)
            == first.rates.known(at=1)
            == [(3, TaskCounts(2.0, 2.0, 1)), (4, TaskCounts(4.0, 0.0, 1))]
        )
    assert not caplog.records
    lines(path, one(3, 0, 8), one(5, 1, 8))
    changed = draws_of(tmp_path, priors_of(path))
    assert f"{path} counts for nothing" in caplog.text
    assert "another content or prior_weight" in caplog.text
    for draws in (first, changed):
        draws.cover(next_lease=8, end=60, at=1)
    assert [changed.task_of(one) for one in range(60)] == [first.task_of(one) for one in range(60)]


def test_priors_that_come_after_the_first_draw_count_for_nothing_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draws_of(tmp_path, None).cover(next_lease=0, end=1, at=0)
    later = draws_of(tmp_path, priors_of(lines(tmp_path / "rates.jsonl", one(3, 4, 8))))
    assert later.rates.known(at=0) == []
    assert "began to draw tasks with none" in caplog.text


def test_a_file_that_was_cut_to_what_is_needed_knows_its_priors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("learner.leases.task_draws._SMALL_BYTES", 500)
    priors = priors_of(lines(tmp_path / "rates.jsonl", one(3, 4, 8)))
    draws = draws_of(tmp_path, priors, half_life=None)
    for lease_id in range(80):
        draws.cover(next_lease=lease_id, end=lease_id + 1, at=0)
    rows = [json.loads(row) for row in (tmp_path / "task_draws.jsonl").read_text().splitlines()]
    assert len(rows) < 10, "it was cut"
    assert rows[0]["priors"] == priors.fingerprint
    assert draws_of(tmp_path, priors, half_life=None).rates.known(at=0) == [(3, TaskCounts(2.0, 2.0, 0))]
    assert not caplog.records


def test_without_priors_the_file_is_what_it_was(tmp_path: Path) -> None:
    draws_of(tmp_path, None).cover(next_lease=0, end=0, at=3)
    text = (tmp_path / "task_draws.jsonl").read_text()
    assert text == '{"run": "r", "first_lease": 0, "parts": [[20, 20]], "known": [], "at": 3}'


def test_an_evaluation_of_other_tasks_than_those_of_training_is_told_by_a_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = evaluated(tmp_path / "evaluation.json", {0: (1.0,), 1: (1.0,)}, prompt="2 + 2")
    draws = draws_of(None, priors_of(path))
    draws.cover(next_lease=0, end=0, at=0)
    draws.accepted(_rolled_out(0, 1.0, prompt="2 + 2"), at=0)
    draws.accepted(_rolled_out(9, 1.0, prompt="of no prior"), at=0)
    assert not caplog.records
    for _ in range(2):
        draws.accepted(_rolled_out(1, 1.0, prompt="3 + 3"), at=0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("rollouts.tasks.priors: training task 1 has another prompt than task 1 of")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([one(3, 9, 8)], r"line 1: task 3 has 9 passes in 8 trials, a rate of more than 1"),
        ([one(3, -1, 8)], r"line 1: passes: Input should be greater than or equal to 0; expected \{\"task\": 0,"),
        ([one(3, 0, 0)], r"line 1: trials: Input should be greater than 0"),
        ([one(3, float("nan"), 8)], r"line 1: passes: Input should be a finite number"),
        ([one(0, 1, 2), one(-1, 1, 2)], r"line 2: task: Input should be greater than or equal to 0"),
        ([one("3", 1, 2)], r"line 1: task: Input should be a valid integer"),
        ([{"task": 3, "score": 0.5}], r"line 1: passes: Field required"),
        ([one(3, 1, 2) | {"rate": 0.5}], r"line 1: rate: Extra inputs are not permitted"),
        ([one(3, 1, 2), one(4, 1, 2), one(3, 1, 2)], r"line 3: task 3 is there a second time"),
        ([], r"tells of no task: expected evaluation\.json of headway eval, or a file NAME\.jsonl of lines"),
    ],
    ids=["rate", "negative", "untried", "nan", "negative task", "text", "score", "extra", "duplicate", "empty"],
)
def test_a_line_that_tells_no_pass_rate_is_refused_by_its_number(
    tmp_path: Path, rows: Sequence[Mapping[str, object]], said: str
) -> None:
    with pytest.raises(PriorsFault, match=rf"rollouts\.tasks\.priors: .*rates\.jsonl,? {said}"):
        priors_of(lines(tmp_path / "rates.jsonl", *rows))


def test_what_is_no_evaluation_is_refused_and_what_helps_is_said(tmp_path: Path) -> None:
    with pytest.raises(PriorsFault, match=r"none\.json cannot be read .*keeps its priors without it"):
        priors_of(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"model": "a"}')
    with pytest.raises(PriorsFault, match=r"other\.json is no evaluation of this release \(checkpoint: Field required"):
        priors_of(tmp_path / "other.json")
    path = evaluated(tmp_path / "evaluation.json", {0: (1.0,)})
    with pytest.raises(PriorsFault, match=r"is of environment 'addition', and rollouts\.environment is 'maze'"):
        read_priors(path, weight=4.0, success_reward=1.0, environment="maze")
    with pytest.raises(PriorsFault, match="tells of no task"):
        priors_of(evaluated(tmp_path / "empty.json", {}))
