"""Harnesses as agents, with a plain program in the place of their drivers: no package of theirs is needed."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from env_service.environments.imported import EnvironmentFault, offered
from env_service.environments.rules import Rules
from env_service.environments.task_configs import ClassTasks
from env_service.harnesses import catalog
from env_service.harnesses.drivers import driving
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from protocol.messages import FailedLease
from tests.env_service.harnesses.conftest import COUNT, HarnessRun, turns_of
from tests.env_service.runtimes.conftest import SMALL, keepers
from tests.process_ends import all_end

PLAIN = Path(__file__).with_name("plain_driver.py")
SOLVES = "grep -c ^ERROR app.log > answer.txt; echo done"


@pytest.fixture(autouse=True)
def plain_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.KnownHarness, "driver", PLAIN)


def options(**settings: Any) -> dict[str, Any]:
    drivers = {"DRIVERS": str(Path(driving.__file__).parent)}
    return {"harness": "anthropic", "python": sys.executable, "settings": settings, "environ": drivers}


async def test_what_a_harness_does_on_the_tasks_computer_is_judged(rolled_out: HarnessRun) -> None:
    ended = await rolled_out(options(turns=2), ["cat app.log", SOLVES])

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.0, "solved")
    assert trajectory.reward.components == {"passed_checks": 1.0, "turns": 2.0, "invalid_actions": 0.0}
    assert "ERROR a" in ended.policy.prompts[1]
    assert list(turns_of(trajectory)) == list(zip(ended.policy.shown, ended.policy.sampled, strict=True))
    assert len(ended.bench.sessions) == 0


async def test_nothing_done_earns_nothing(rolled_out: HarnessRun) -> None:
    (trajectory,) = (await rolled_out(options(), ["true"])).trajectories

    assert (trajectory.reward.reward, trajectory.stop_reason) == (0.0, "failed")


async def test_a_verifier_judges_the_answer_of_the_harness_and_not_the_policys_words(rolled_out: HarnessRun) -> None:
    ended = await rolled_out(options(answer="5"), ["I call a tool with 5."], questions=True)

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.0, "answered")


async def test_a_harness_is_told_nothing_of_how_it_is_judged_and_sees_nothing_of_the_process(
    rolled_out: HarnessRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_ENV_SERVICE__HTTP__TOKEN", "secret")
    monkeypatch.setenv("OPENAI_ORG_ID", "of the user's own account")
    folders: list[str] = []
    for questions, asked in ((False, COUNT["prompt"]), (True, "What is 2+3?")):
        await rolled_out(options(told=str(tmp_path / "told")), ["5"], questions=questions)
        told = json.loads((tmp_path / "told").read_text())
        assert told["prompt"] == asked
        assert told["data"] == ({"topic": "sums"} if questions else {})
        assert ("/work" in told["instructions"]) == (not questions)
        assert not {"HEADWAY_ENV_SERVICE__HTTP__TOKEN", "OPENAI_ORG_ID"} & set(told["names"])
        assert ("AGENT_COMMANDS_URL" in told["names"]) == (not questions)
        folders.append(told["folder"])
    assert len(set(folders)) == 2, "each run has a folder of its own"


async def test_sampling_that_a_harness_wants_gives_way_and_is_counted(rolled_out: HarnessRun) -> None:
    ended = await rolled_out(options(), ["5"], questions=True)

    labels = {"environment": "agent", "field": "temperature"}
    name = "headway_env_service_agent_fields_ignored_total"
    assert ended.bench.metrics.registry.get_sample_value(name, labels) == 1.0
    refused = await rolled_out({**options(), "other_sampling": "refuse"}, ["5"], questions=True)
    assert isinstance(refused.outcome, FailedLease)
    assert "400" in refused.outcome.reason


async def test_the_work_of_a_harness_that_a_limit_cuts_off_is_judged_as_it_stands(rolled_out: HarnessRun) -> None:
    ended = await rolled_out(options(turns=9), [SOLVES], rules=Rules(max_turns=2))

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.stop_reason, len(trajectory.turns)) == (1.0, "turn_limit", 2)


async def test_commands_end_as_in_a_shell(rolled_out: HarnessRun, tmp_path: Path) -> None:
    lines = ["echo out; echo err >&2; exit 3", "kill -9 $$", "sleep 60", "pwd; readlink /proc/$$/exe"]
    await rolled_out(options(commands=lines, ends=str(tmp_path / "ends")), ["true"])

    failed, killed, late, place = json.loads((tmp_path / "ends").read_text())
    assert (failed["output"], failed["exit_code"], failed["timed_out"]) == ("out\nerr\n", 3, False)
    assert killed["exit_code"] == 137
    assert (late["timed_out"], late["exit_code"]) == (True, 137)
    assert place["output"].splitlines()[0] == "/work"


async def test_killing_a_harness_costs_its_trajectory_alone_and_leaves_nothing(
    rolled_out: HarnessRun, tmp_path: Path
) -> None:
    pids: list[int] = []

    def kill(_number: int) -> None:
        if not pids:
            pids.extend(map(int, (tmp_path / "child").read_text().split()))
            os.kill(pids[1], signal.SIGKILL)

    ended = await rolled_out(options(child=str(tmp_path / "child")), [SOLVES], before=kill, group_size=3)

    rewards = [each.reward for each in ended.trajectories]
    assert sorted(each.reward for each in rewards if each.reward is not None) == [1.0, 1.0]
    assert all_end(pids)
    assert len(ended.bench.sessions) == 0
    assert await asyncio.to_thread(lambda: all_end(keepers()))


async def test_a_harness_that_hangs_costs_its_trajectory(rolled_out: HarnessRun) -> None:
    ended = await rolled_out({**options(hangs=True), "timeout_s": 3.0}, ["true"])

    assert isinstance(ended.outcome, FailedLease)
    assert "anthropic was not done within 3 s" in ended.outcome.reason
    assert await asyncio.to_thread(lambda: all_end(keepers()))


async def test_a_computer_whose_time_is_over_ends_the_task(rolled_out: HarnessRun) -> None:
    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=SMALL.model_copy(update={"lifetime_s": 1.0}))))
    try:
        (trajectory,) = (await rolled_out(options(turns=5), ["sleep 10"])).trajectories
    finally:
        await pool.close()

    assert (trajectory.reward.reward, trajectory.stop_reason) == (0.0, "computer_ended")
    assert len(trajectory.turns) == 1


async def test_a_computer_that_is_lost_is_no_fault_of_the_task(rolled_out: HarnessRun) -> None:
    ended = await rolled_out(options(turns=5), ["true"], before=lambda number: os.kill(keepers()[0], signal.SIGKILL))

    assert isinstance(ended.outcome, FailedLease)
    assert not ended.outcome.data_fault, ended.outcome.reason


TASKS = {"questions": {"train_file": "q.jsonl", "verifier": "exact"}}
COMPUTER = {"computer": {"train_file": "q.jsonl"}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"harness": "mini-swe-agent", "tasks": TASKS}, "only runs commands, and questions have no computer"),
        ({"harness": "smolagents", "tasks": TASKS, "python": "no/such"}, "python is no/such, and that is not there"),
        ({"harness": "smolagents", "tasks": TASKS, "installed": "nowhere"}, "env-service harness install smolagents"),
        ({"harness": "smolagents", "tasks": {}}, "expected one of computer, harbor, repositories, questions"),
        (
            {"harness": "smolagents", "tasks": {"computer": {"train_file": "q.jsonl", "tools": ["shell"]}}},
            "tools is set, and the harness has tools of its own",
        ),
        (
            {"harness": "mini-swe-agent", "tasks": {"computer": {"train_file": "q", "system_prompt": "x"}}},
            "system_prompt is set, and mini-swe-agent has one of its own",
        ),
        ({"harness": "nobody", "tasks": TASKS}, "nobody"),
        ({"harness": "smolagents", "tasks": TASKS, "inside": True}, "questions have no computer to run in"),
        (
            {"harness": "smolagents", "tasks": COMPUTER, "inside": True, "memory_mb": 512},
            "memory_mb is set, and inside is true",
        ),
        (
            {"harness": "smolagents", "tasks": COMPUTER, "inside": True, "python": "/bin/sh"},
            "is no virtual environment",
        ),
    ],
)
def test_mistakes_are_told_at_the_start(given: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFault, match=said):
        offered(ClassTasks(source="harness", name="mine", options=given))


def test_each_harness_has_its_driver_and_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for harness in catalog.HARNESSES.values():
        assert harness.driver.is_file()
        wanted = harness.lock.with_suffix(".in").read_text().strip().replace("[openai]", "")
        assert wanted in harness.lock.read_text().splitlines()
