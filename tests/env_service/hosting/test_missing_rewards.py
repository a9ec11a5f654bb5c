"""A server of others that gives no reward is at fault, which is no reward of 0; what ended an episode here counts."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import web

from env_service.environments.interface import Action, AgentClient, AgentResult, EnvironmentFailed, Task
from env_service.hosting import verifiers_server
from env_service.hosting.openenv import OpenEnvEnvironment, OpenEnvOptions
from env_service.hosting.verifiers_server import VerifiersAgent, VerifiersOptions
from protocol.codec import pack_value
from services.zmq.sockets import SendTimeout


class ScriptedServer:
    """An env server whose episode has the `traces`; without any it never ends, and cannot be told to."""

    traces: Sequence[dict[str, Any]] = ()

    def __init__(self, address: str) -> None:
        self._frames: asyncio.Queue[Sequence[bytes]] = asyncio.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    async def send(self, *frames: bytes) -> None:
        name, kind, _ = frames
        if kind == b"cancel":
            raise SendTimeout("it took no message for 5 s")
        if kind == b"health":
            self._frames.put_nowait((name, b"reply", pack_value({})))
        elif self.traces:
            for number, fields in enumerate(self.traces):
                self._frames.put_nowait((name, b"delta", pack_value({"trace": str(number), "set": fields})))
            self._frames.put_nowait((name, b"reply", pack_value({"success": True})))

    async def receive(self) -> Sequence[bytes]:
        return await self._frames.get()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiersAgent:
    monkeypatch.setattr(verifiers_server, "PlainDealer", ScriptedServer)
    return VerifiersAgent(VerifiersOptions(addresses=("tcp://127.0.0.1:1",), train_file=tmp_path / "tasks.jsonl"))


async def _nothing() -> Any:
    raise AssertionError


CLIENT = AgentClient(base_url="http://localhost/v1", key="k", model="policy", seed=0, posted=_nothing, offer=_nothing)


@pytest.mark.parametrize("traces", [[{}], [{"rewards": {}, "metrics": {"tries": 2.0}}], [{"rewards": {"right": None}}]])
async def test_an_episode_without_a_reward_is_at_fault(
    agent: VerifiersAgent, monkeypatch: pytest.MonkeyPatch, traces: Sequence[dict[str, Any]]
) -> None:
    monkeypatch.setattr(ScriptedServer, "traces", traces)

    with pytest.raises(EnvironmentFailed, match="gives no reward, and no reason for that") as failed:
        await agent.run(Task(), CLIENT)

    assert failed.value.kind == "nonsense"


async def test_an_episode_has_the_rewards_that_were_given(
    agent: VerifiersAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedServer, "traces", [{"rewards": {"right": {"score": 0.0}}}])

    assert await agent.run(Task(), CLIENT) == AgentResult(0.0, metrics={"right": 0.0})


async def test_a_cancelled_episode_is_cancelled_though_its_server_cannot_be_told(agent: VerifiersAgent) -> None:
    running = asyncio.ensure_future(agent.run(Task(), CLIENT))
    await asyncio.sleep(0.05)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


@asynccontextmanager
async def session_of(rewards: Sequence[float | None]) -> AsyncIterator[OpenEnvEnvironment]:
    """A conversation with a server whose steps have these rewards; the last one ends it."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        given = [None, *rewards]
        for at, reward in enumerate(given):
            await socket.receive()
            seen = {"observation": {"hint": "low"}, "reward": reward, "done": at == len(given) - 1}
            await socket.send_str(json.dumps({"type": "observation", "data": seen}))
        return socket

    app = web.Application()
    app.router.add_get("/ws", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    environment = OpenEnvEnvironment(OpenEnvOptions(urls=(f"ws://127.0.0.1:{port}",)))
    try:
        await environment.reset(Task(), 0)
        yield environment
    finally:
        await environment.close()
        await runner.cleanup()


async def test_a_session_that_ends_without_a_reward_is_at_fault() -> None:
    async with session_of([None, None]) as environment:
        assert not (await environment.step(Action("1", value={}))).ends
        with pytest.raises(EnvironmentFailed, match="ended the session without a reward in any of its steps") as failed:
            await environment.step(Action("1", value={}))

    assert failed.value.kind == "nonsense"


async def test_a_session_may_have_its_reward_in_any_step() -> None:
    async with session_of([0.5, None]) as environment:
        steps = [await environment.step(Action("1", value={})) for _ in range(2)]

    assert [step.reward for step in steps] == [0.5, 0.0]
    assert steps[1].stop == "done"
