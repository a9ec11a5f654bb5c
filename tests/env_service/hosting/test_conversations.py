"""Conversations at a host whose callers come and go."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from env_service.environments.interface import Action, Task
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.host_service import ConversationLimits, Conversations
from env_service.hosting.hosted import Hosting
from env_service.hosting.messages import HostCall, HostReply, Reset


@asynccontextmanager
async def conversations(*, isolation: str, processes: int = 1, **limits: Any) -> AsyncIterator[Conversations]:
    settings = {"isolation": isolation, "processes": processes, "spares": 0, "name": "naughty"}
    entry = ClassTasks.model_validate({**settings, "source": "tests.env_service.hosting.naughty:Naughty"})
    hosting = Hosting(workers=1, environment_timeout_s=60)
    made = Conversations(hosting.offered(entry), ConversationLimits(**limits))
    async with hosting:
        yield made


async def begun(host: Conversations, about: str) -> HostReply:
    reset = Reset(task=Task(), seed=0)
    return await host.reply(HostCall(kind="reset", about=about, reset=reset))


async def step(host: Conversations, about: str) -> HostReply:
    return await host.reply(HostCall(kind="step", about=about, action=Action("on")))


def fault(reply: HostReply) -> str:
    assert reply.fault is not None
    return reply.fault.text


FULL = [
    pytest.param("workers", {"most": 2}, "has its 2 conversations already", id="conversations"),
    pytest.param("process", {"processes": 2}, "all 2 processes are taken", id="processes"),
]


@pytest.mark.parametrize(("isolation", "limits"), [("workers", {"most": 2}), ("process", {"processes": 2})])
async def test_a_full_host_closes_the_conversation_that_was_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch, isolation: str, limits: dict[str, Any]
) -> None:
    """As those of a caller that was killed are; a conversation that goes on keeps its place."""
    monkeypatch.setattr("env_service.hosting.pool._WAIT_S", 0.05)
    async with conversations(isolation=isolation, silent_s=0.0, **limits) as host:
        for about in ("left", "goes on"):
            assert (await begun(host, about)).fault is None
        assert (await step(host, "goes on")).fault is None
        assert (await begun(host, "new")).fault is None
        assert (await step(host, "goes on")).fault is None
        assert (await step(host, "new")).fault is None
        assert "forgot it" in fault(await step(host, "left"))


@pytest.mark.parametrize(("isolation", "limits", "full"), FULL)
async def test_a_full_host_of_conversations_that_go_on_says_so(
    monkeypatch: pytest.MonkeyPatch, isolation: str, limits: dict[str, Any], full: str
) -> None:
    monkeypatch.setattr("env_service.hosting.pool._WAIT_S", 0.05)
    async with conversations(isolation=isolation, **limits) as host:
        for about in ("one", "two"):
            assert (await begun(host, about)).fault is None
        assert full in fault(await begun(host, "three"))
        await host.reply(HostCall(kind="close", about="one"))
        assert (await begun(host, "three")).fault is None
