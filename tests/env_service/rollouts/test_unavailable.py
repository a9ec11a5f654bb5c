"""An environment that is not available is a failure of infrastructure: tried again, and nobody's fault here."""

from pathlib import Path
from typing import ClassVar

import pytest

from env_service.environments.interface import (
    Action,
    ChatMessage,
    EnvironmentFull,
    EnvironmentUnavailable,
    OfferedEnvironment,
    Opening,
    Step,
    Task,
)
from env_service.environments.rules import Rules
from env_service.rollouts.completions import RolloutProgress
from protocol.messages import FinishedLease
from tests.env_service.bench import MakeBench
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import ConversationTasks, TrajectoryWords, counted


class Full:
    """A game on a server that is full for the first `refusals` openings, and away at the word `away`."""

    refusals: ClassVar[int] = 0
    refusal: ClassVar[type[EnvironmentUnavailable]] = EnvironmentUnavailable
    closed: ClassVar[int] = 0
    seen_by: ClassVar[RolloutProgress | None] = None
    waits: ClassVar[list[str]] = []

    def reset(self, task: Task, seed: int) -> Opening:
        if Full.seen_by is not None:
            Full.waits.append(Full.seen_by.waits_for)
        if Full.refusals:
            Full.refusals -= 1
            raise Full.refusal("the server is full")
        return Opening((ChatMessage("user", "go"),))

    def step(self, action: Action) -> Step:
        if action.text == "away":
            raise EnvironmentUnavailable("the server went away")
        if action.text == "boom":
            raise ValueError("a bug of mine")
        return Step(reward=1.0, stop="done")

    def close(self) -> None:
        Full.closed += 1


FULL = OfferedEnvironment(name="full", tasks=ConversationTasks(), start=Full, rules=Rules())


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    Full.refusals = Full.closed = 0
    Full.refusal, Full.seen_by, Full.waits = EnvironmentUnavailable, None, []
    return model_with("chatml", tmp_path)


async def test_an_opening_is_tried_again_and_lets_go_of_what_it_had(chat_bench: MakeBench, chat_model: Path) -> None:
    Full.refusals = 2
    made = await chat_bench(TrajectoryWords(chat_model, "well", "well"), extra=[FULL])

    group = (await made.finished(lease(environment="full"))).group

    assert [trajectory.reward.reward for trajectory in group.trajectories] == [1.0, 1.0]
    assert Full.closed == 3 * 2
    assert len(made.pauses) == 2


async def test_an_opening_that_finds_nobody_waits_and_says_for_whom(chat_bench: MakeBench, chat_model: Path) -> None:
    Full.refusals = 100
    made = await chat_bench(TrajectoryWords(chat_model, "well", "well"), extra=[FULL])
    Full.seen_by = progress = RolloutProgress()

    outcome = await made.rollout.run(lease(environment="full"), progress)

    assert isinstance(outcome, FinishedLease)
    assert (Full.waits[0], set(Full.waits[2:])) == ("environment", {"host"})
    assert progress.said == "the server is full"
    assert len(made.pauses) >= 50
    assert progress.waits_for != "host"


async def test_the_time_in_which_nobody_was_found_is_not_held_against_the_task(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    Full.refusals = 1_000_000
    made = await chat_bench(TrajectoryWords(chat_model, "well"), extra=[FULL], timeout_s=0.3)

    failed = await made.failed(lease(environment="full"))

    assert not failed.data_fault
    assert "it was waiting for the host of its environment: the server is full" in failed.reason


async def test_an_opening_that_finds_no_place_is_for_another_to_try(chat_bench: MakeBench, chat_model: Path) -> None:
    Full.refusals, Full.refusal = 100, EnvironmentFull
    made = await chat_bench(TrajectoryWords(chat_model, "well", "well"), extra=[FULL])

    failed = await made.failed(lease(environment="full"))

    assert not failed.data_fault
    assert failed.reason == "environment full: the server is full"
    assert counted(made, "failed_leases_total", kind="infrastructure") == 1


async def test_a_step_costs_its_trajectory_as_infrastructure(chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "away", "well"), extra=[FULL])

    lost, kept = (await made.finished(lease(environment="full"))).group.trajectories

    assert (lost.reward.reward, lost.reward.error_kind) == (None, "infrastructure")
    assert lost.reward.error == "environment full: the server went away"
    assert kept.reward.reward == 1.0
    assert counted(made, "environment_faults_total", environment="full", kind="unavailable") == 1


async def test_a_group_with_nothing_left_is_worth_another_attempt(chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "boom", "away"), extra=[FULL])

    failed = await made.failed(lease(environment="full"))

    assert not failed.data_fault
    assert failed.reason == "the server went away"
