"""An env_service that ends in the middle of its conversations, and goes on with them when it is started again."""

import json
import signal
from pathlib import Path

import pytest

from env_service.checkpoints.rows import RecordedLease, read_record
from tests.e2e.processes import ROOT, Launcher, until
from tests.e2e.run_files import RunFile, write_run_file

pytestmark = pytest.mark.e2e

GAMES = Path(__file__).parent / "several_turns"
TURNS = 12
STEPS = 2


def recorded(folder: Path) -> dict[int, RecordedLease]:
    """The records of an env_service, by lease."""
    found = [read_record(path) for path in folder.glob("*/train-*.turns")]
    return {each.first.lease.lease_id: each for each in found if each is not None}


def in_the_middle(records: dict[int, RecordedLease]) -> bool:
    """True once all conversations of a step's leases have had some turns, and none of them all."""
    turns = [len(each) for one in records.values() for each in one.turns.values()]
    return len(turns) >= 32 and min(turns) >= 3 and max(turns) < TURNS


def launched_run(launch: Launcher, run_file: RunFile, *words: str) -> None:
    config = ("--config", str(run_file.path))
    launch("generator", *config)
    launch("reward-service", *config)
    launch("env-service", *config, *words)
    launch(
        "learner", *config, "--rollouts.environment", "walk", "--steps", str(STEPS), "--evaluation.tasks", "0",
        "--evaluation.final-tasks", "0", "--groups-per-step", "4", "--max-lag", "0", "--leases.timeout-s", "60",
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "rolled"])
def test_an_env_service_goes_on_at_the_turn_at_which_it_was_with_the_very_tokens(
    untrained_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_file = write_run_file(tmp_path, model=untrained_model)
    folder, steps = tmp_path / "conversations", tmp_path / "steps.txt"
    environments = [{"source": "long_walk:LongWalk", "name": "walk", "train_tasks": 100, "evaluation_tasks": 0}]
    words = ("--environments", json.dumps(environments), "--checkpoints.folder", str(folder))
    launch = Launcher(folder=tmp_path, environment={"PYTHONPATH": f"{ROOT}:{GAMES}", "STEPS": str(steps)})
    try:
        launched_run(launch, run_file, *words)
        *_, first, learner = launch.launched
        until(lambda: in_the_middle(recorded(folder)), what="turns of all", during=launch.launched)
        first.send(number)
        assert first.wait() == (0 if number == signal.SIGTERM else -number)
        before = recorded(folder)
        second = launch("env-service", "--config", str(run_file.path), *words)
        assert learner.wait(timeout_s=280) == 0, learner.text()
    finally:
        for each in launch.launched:
            each.end()

    run = run_file.run()
    groups = {group.lease_id: group for _, batch in run.batches() for group in batch}
    assert before.keys() <= groups.keys()
    for lease_id, one in before.items():
        assert groups[lease_id].attempt == one.first.lease.attempt == 0
        for index, trajectory in enumerate(groups[lease_id].trajectories):
            said = [each.turn for each in one.turns[index]]
            kept = trajectory.turns[: len(said)]
            rows = trajectory.token_ids.tolist(), trajectory.behavior_logprobs.tolist()
            assert [rows[0][turn.completion_start : turn.end] for turn in kept] == [[*row.token_ids] for row in said]
            assert [rows[1][turn.completion_start : turn.end] for turn in kept] == [
                pytest.approx([*row.behavior_logprobs]) for row in said
            ]
            assert len(trajectory.turns) == TURNS
    books = run.summary()["books"]
    assert (books["expired"], books["failed"], books["attempts"]) == (0, 0, books["accepted"])
    asked = steps.read_text(encoding="utf-8").split().count(str(second.pid))
    assert asked == STEPS * 4 * 8 * TURNS  # the turns before its death were gone through once more
    assert list(folder.glob("*/*.turns")) == []
