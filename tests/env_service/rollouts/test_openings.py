"""The members of a group are opened and closed side by side, and fail as if they had been one after the other."""

import asyncio
import logging
from pathlib import Path

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
from env_service.rollouts.environment_calls import _AT_ONCE
from tests.env_service.bench import MakeBench
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import ConversationTasks, TrajectoryWords

GROUP = 4


class SlowEnvironment:
    """Opens when `together` of its group have begun to; the `member`-th that was made raises `fault` instead."""

    def __init__(self, group: "OpeningGroup") -> None:
        self._group = group
        self.member = len(group.made)
        self.closed = False
        group.made.append(self)

    async def reset(self, task: Task, seed: int) -> Opening:
        group = self._group
        group.opening += 1
        group.most = max(group.most, group.opening)
        try:
            if group.most >= group.together:
                group.met.set()
            await group.met.wait()
            if self.member in group.faults:
                raise group.faults[self.member]
            if self.member in group.hanging:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return Opening((ChatMessage("user", "go"),))
        except asyncio.CancelledError:
            group.broken_off.append(self.member)
            raise
        finally:
            group.opening -= 1

    def step(self, action: Action) -> Step:
        return Step(reward=1.0, stop="done")

    async def close(self) -> None:
        if self.member == 0:
            raise OSError("cannot be closed")
        self.closed = True


class OpeningGroup:
    """Environments of one lease, and the faults that they meet while they open."""

    def __init__(self, *, together: int) -> None:
        self.together = together
        self.made: list[SlowEnvironment] = []
        self.opening = self.most = 0
        self.met = asyncio.Event()
        self.faults: dict[int, Exception] = {}
        self.hanging: set[int] = set()
        self.broken_off: list[int] = []

    def offered(self) -> OfferedEnvironment:
        return OfferedEnvironment(
            name="slow", tasks=ConversationTasks(), start=lambda: SlowEnvironment(self), rules=Rules()
        )


async def test_a_group_opens_side_by_side(chat_bench: MakeBench, chat_model: Path) -> None:
    group = OpeningGroup(together=GROUP)
    made = await chat_bench(TrajectoryWords(chat_model, *["well"] * GROUP), extra=[group.offered()])

    finished = await made.finished(lease(environment="slow", group_size=GROUP))

    assert [one.reward.reward for one in finished.group.trajectories] == [1.0] * GROUP


async def test_openings_side_by_side_are_bounded(chat_bench: MakeBench, chat_model: Path) -> None:
    group = OpeningGroup(together=_AT_ONCE)
    made = await chat_bench(TrajectoryWords(chat_model, *["well"] * 40), extra=[group.offered()])

    await made.finished(lease(environment="slow", group_size=40))

    assert group.most == _AT_ONCE


async def test_the_first_member_that_fails_counts_and_the_others_are_broken_off(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    group = OpeningGroup(together=GROUP)
    group.faults = {1: ValueError("a bug of mine"), 2: EnvironmentUnavailable("full")}
    group.hanging = {3}
    made = await chat_bench(TrajectoryWords(chat_model, *["well"] * GROUP), extra=[group.offered()])

    failed = await made.failed(lease(environment="slow", group_size=GROUP))

    assert failed.data_fault
    assert failed.reason == "ValueError: a bug of mine"
    assert group.broken_off == [3]
    assert [one.closed for one in group.made] == [False, True, True, True]


async def test_an_environment_that_cannot_be_closed_keeps_no_other_from_it(
    chat_bench: MakeBench, chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = OpeningGroup(together=1)
    made = await chat_bench(TrajectoryWords(chat_model, *["well"] * GROUP), extra=[group.offered()])

    with caplog.at_level(logging.WARNING):
        await made.finished(lease(environment="slow", group_size=GROUP))

    assert [one.closed for one in group.made] == [False, True, True, True]
    assert "an environment could not be closed" in caplog.text
