"""`headway eval` with processes that it starts, and with those that run already."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.long_lived_system import LongLivedSystem
from tests.e2e.processes import Launcher, marked, until
from tests.e2e.run_files import write_run_file
from tests.reward_service.judges.scripted_judge import asked_of, judge, winner

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PATIENCE_S = 180.0
TASKS = 100


def evaluation(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_starts_what_is_missing_and_leaves_nothing_but_its_file(
    launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path, model=model)
    output = tmp_path / "found.json"
    words = ("--tasks", str(TASKS), "--samples", "4", "--output", str(output))
    headway = launcher("headway", "eval", str(run_file.path), *words)
    assert headway.wait(timeout_s=PATIENCE_S) == 0, headway.text()
    assert marked(launcher.mark) == {}
    assert not (tmp_path / "runs").exists(), "no run's folder is made"
    found = evaluation(output)
    result, tasks = found["result"], found["tasks"]
    assert (result["tasks"], result["samples"], result["failed"]) == (TASKS, 4 * TASKS, 0)
    assert [task["task_index"] for task in tasks] == list(range(TASKS))
    rewards = [[sample["reward"] for sample in task["samples"]] for task in tasks]
    assert result["accuracy"] == pytest.approx(sum(map(sum, rewards)) / (4 * TASKS))
    assert result["pass_at_k"]["1"] == pytest.approx(result["accuracy"])
    assert result["pass_at_k"]["4"] == pytest.approx(sum(map(max, rewards)) / TASKS)
    assert 0 < result["accuracy"] < result["pass_at_k"]["4"], "the samples of a task differ"
    assert result["accuracy_low"] < result["accuracy"] < result["accuracy_high"]
    assert f"on {TASKS} held-out tasks of addition" in headway.text()
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in headway.text()


def test_it_uses_what_runs_already_for_a_checkpoint_and_a_model_and_disturbs_no_run(
    system: LongLivedSystem, launcher: Launcher, tmp_path: Path
) -> None:
    plain = ("--evaluation.tasks", "0", "--evaluation.final-tasks", "0")
    with system.learner("before", "--steps", "4", "--checkpoint.every-steps", "4", *plain) as (learner, run):
        assert learner.wait(timeout_s=PATIENCE_S) == 0, learner.text()
    files = contents(run.path)
    first, second = tmp_path / "checkpoint.json", tmp_path / "model.json"
    for words in (
        ("--checkpoint", str(run.path / "checkpoint-00000004"), "--output", str(first)),
        ("--model", str(run.path / "model"), "--output", str(second), "--against", str(first)),
    ):
        common = ("--run.name", "before", "--tasks", str(TASKS))
        headway = launcher("headway", "eval", str(system.run_file.path), *common, *words)
        assert headway.wait(timeout_s=PATIENCE_S) == 0, headway.text()
        assert "generator      " not in headway.text(), "the one that runs is used"
    assert contents(run.path) == files
    of_checkpoint, of_model = evaluation(first), evaluation(second)
    assert of_checkpoint["checkpoint"] == str(run.path / "checkpoint-00000004")
    assert (of_model["checkpoint"], of_model["model"]) == (None, str(run.path / "model"))
    # The same weights and seeds; even without the seeds, 0.15 is more than four standard deviations.
    assert of_model["comparison"]["tasks"] == TASKS
    assert of_model["comparison"]["win_rate"] == pytest.approx(0.5, abs=0.15)
    assert "win rate     " in headway.text()

    assert all(service.alive for service in system.services.values())
    with system.learner("after", "--steps", "3", *plain) as (learner, run):
        assert learner.wait(timeout_s=PATIENCE_S) == 0, learner.text()
    assert run.steps() == [1, 2, 3]


def test_a_learner_that_runs_keeps_its_place(system: LongLivedSystem, launcher: Launcher) -> None:
    with system.learner("keeps", "--steps", "100000", "--evaluation.tasks", "0") as (learner, run):
        until(lambda: run.steps(), what="a step", timeout_s=PATIENCE_S, during=[learner])
        headway = launcher("headway", "eval", str(system.run_file.path))
        assert headway.wait(timeout_s=PATIENCE_S) == 2
        assert learner.alive
    assert "whose place an evaluation takes" in headway.text()


async def test_a_judge_compares_it_with_an_opponent_s_answers(launcher: Launcher, model: Path, tmp_path: Path) -> None:
    """The judge is a model of a script's, behind real HTTP: it prefers ours, in whichever order."""
    run_file = write_run_file(tmp_path, model=model)
    output, opponent = tmp_path / "found.json", tmp_path / "opponent.jsonl"
    sums = (f"{left:02d}+{right:02d}=" for left in range(100) for right in range(100))
    lines = [json.dumps({"prompt": prompt, "completion": "who knows"}) for prompt in sums]
    opponent.write_text("\n".join(lines), encoding="utf-8")
    api = judge(lambda _, asked: winner(asked, "second" if asked.text(1) == "who knows" else "first"))
    async with api.running() as url:
        with run_file.path.open("a", encoding="utf-8") as file:
            file.write(f'[[reward-service.judges]]\nname = "taste"\nkind = "pairwise"\nurl = "{url}/v1"\nmodel = "m"\n')
        words = ("--tasks", "20", "--samples", "2", "--output", str(output), "--against", str(opponent))
        judging = ("--judge", "taste", "--learner.evaluation.judge.urls", run_file.url("reward"))
        headway = launcher("headway", "eval", str(run_file.path), *words, *judging)
        code = await asyncio.to_thread(headway.wait, timeout_s=PATIENCE_S)
        assert code == 0, headway.text()

    judged = evaluation(output)["judged"]
    assert (judged["win_rate"], judged["tie_rate"], judged["pairs"], judged["failed"]) == (1.0, 0.0, 40, 0)
    assert judged["verifier"] == "taste"
    assert "preferred    100.0%" in headway.text()
    shown = [(asked.text(1), asked.text(2)) for asked in asked_of(api)]
    assert {place for pair in shown for place, answer in enumerate(pair) if answer == "who knows"} == {0, 1}
