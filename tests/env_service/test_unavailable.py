"""An environment that is not available is a failure of infrastructure: tried again, and nobody's fault here."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from env_service.environments.interface import (
    Action,
    ChatMessage,
    EnvironmentUnavailable,
    OfferedEnvironment,
    Opening,
    Step,
    Task,
)
from env_service.environments.rules import Rules
from tests.env_service.bench import MakeBench, benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease
from tests.env_service.test_several_turns import Tasks, Words, counted


class Full:
    """A game on a server that is full for the first `refusals` openings, and away at the word `away`."""

    refusals: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def reset(self, task: Task, seed: int) -> Opening:
        if Full.refusals:
            Full.refusals -= 1
            raise EnvironmentUnavailable("the server is full")
        return Opening((ChatMessage("user", "go"),))

    def step(self, action: Action) -> Step:
        if action.text == "away":
            raise EnvironmentUnavailable("the server went away")
        if action.text == "boom":
            raise ValueError("a bug of mine")
        return Step(reward=1.0, stop="done")

    def close(self) -> None:
        Full.closed += 1


FULL = OfferedEnvironment(name="full", tasks=Tasks(), start=Full, rules=Rules())


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    Full.refusals = Full.closed = 0
    return model_with("chatml", tmp_path)


@pytest.fixture
async def bench(chat_model: Path) -> AsyncIterator[MakeBench]:
    async with benches(chat_model) as make:
        yield make


async def test_an_opening_is_tried_again_and_lets_go_of_what_it_had(bench: MakeBench, chat_model: Path) -> None:
    Full.refusals = 2
    made = await bench(Words(chat_model, "well", "well"), extra=[FULL])

    group = (await made.finished(lease(environment="full"))).group

    assert [trajectory.reward.reward for trajectory in group.trajectories] == [1.0, 1.0]
    assert Full.closed == 3 * 2
    assert len(made.pauses) == 2


async def test_an_opening_that_never_succeeds_is_for_another_to_try(bench: MakeBench, chat_model: Path) -> None:
    Full.refusals = 100
    made = await bench(Words(chat_model, "well", "well"), extra=[FULL])

    failed = await made.failed(lease(environment="full"))

    assert not failed.data_fault
    assert failed.reason == "environment full: the server is full"
    assert counted(made, "failed_leases_total", kind="infrastructure") == 1


async def test_a_step_costs_its_trajectory_as_infrastructure(bench: MakeBench, chat_model: Path) -> None:
    made = await bench(Words(chat_model, "away", "well"), extra=[FULL])

    lost, kept = (await made.finished(lease(environment="full"))).group.trajectories

    assert (lost.reward.reward, lost.reward.error_kind) == (None, "infrastructure")
    assert lost.reward.error == "environment full: the server went away"
    assert kept.reward.reward == 1.0
    assert counted(made, "environment_faults_total", environment="full", kind="unavailable") == 1


async def test_a_group_with_nothing_left_is_worth_another_attempt(bench: MakeBench, chat_model: Path) -> None:
    made = await bench(Words(chat_model, "boom", "away"), extra=[FULL])

    failed = await made.failed(lease(environment="full"))

    assert not failed.data_fault
    assert failed.reason == "the server went away"
