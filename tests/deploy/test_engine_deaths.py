"""Deaths of engines and services, and the end of a Compose project: nothing of any runtime is left."""

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from pydantic import JsonValue

from env_service.builtin.computer import ComputerEnvironment
from env_service.environments import catalog
from env_service.environments.interface import Action, Step
from env_service.environments.task_configs import ClassTasks
from env_service.runtimes.interface import CommandEnd, RuntimeLost
from env_service.runtimes.pool import RuntimePool, use_runtimes
from protocol.generation import Sampling
from protocol.messages import Fleet, Hello, Welcome
from services.local_processes import each_process
from services.zmq.sockets import RouterSocket
from tests.deploy.containers import ROOT, ContainerEngine, Project, installed_packages, run
from tests.deploy.daemons import Daemon, DockerDaemon
from tests.deploy.on_engines import SERVICE, TriedEngine, config_of, ids, said, sh
from tests.env_service.bench import benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import ScriptedCompletions, ScriptedLearner, eventually, lease, served, serving
from tests.env_service.rollouts.test_on_computers import TrajectoryCalls

pytestmark = [pytest.mark.compose, pytest.mark.timeout(300)]

TASK = {"prompt": "Write 3 into answer.txt.", "checks": [{"run": "cat answer.txt", "prints": "3"}]}
Calls = list[tuple[str, dict[str, JsonValue]]]
SOLVES: Calls = [("shell", {"command": "echo 3 > answer.txt"}), ("submit", {})]


@pytest.fixture
def marker() -> str:
    """Seconds that nothing else on this machine sleeps."""
    return str(uuid.uuid4().int % 10**9 + 10**9)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TASK))
    return path


def sleepers(marker: str) -> list[str]:
    """Processes of this machine that have it among their words."""
    return [str(pid) for pid, words in each_process("cmdline") if marker.encode() in words.split(b"\0")]


async def until_none(look: Callable[[], Awaitable[list[str]]], *, what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := await look():
        assert time.monotonic() < deadline, f"{what}: {left}"
        await asyncio.sleep(0.2)


async def nothing_is_left(socket: Path, marker: str) -> None:
    async def running() -> list[str]:
        return sleepers(marker)

    await until_none(lambda: ids(socket), what="containers are left")
    await until_none(running, what="processes are left")


@asynccontextmanager
async def killed_service(socket: Path, image: str, marker: str) -> AsyncIterator[None]:
    """The time after the death of a service that had two runtimes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = SERVICE.replace("SECONDS", marker)
    command = [sys.executable, "-c", script, config_of(socket, image).model_dump_json()]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"stands\n"
        assert len(await ids(socket, running=True)) == len(sleepers(marker)) == 2
    finally:
        child.kill()
        await child.wait()
    yield


async def test_nothing_is_left_of_a_killed_service(tried: TriedEngine, marker: str) -> None:
    async with killed_service(tried.socket, tried.image, marker):
        await until_none(lambda: ids(tried.socket, running=True), what="containers go on without their service")
        assert len(await ids(tried.socket)) == 2
        pool = RuntimePool(config_of(tried.socket, tried.image))
        try:
            await pool.open()
            assert await ids(tried.socket) == [], "the next service removes what is left"
            await nothing_is_left(tried.socket, marker)
        finally:
            await pool.close()


async def test_nothing_is_left_of_a_service_and_an_engine_that_were_killed_together(
    mortal: Daemon, marker: str
) -> None:
    async with killed_service(mortal.socket, "small", marker):
        await asyncio.to_thread(mortal.signal, signal.SIGKILL)
        await asyncio.to_thread(mortal.start)
        pool = RuntimePool(config_of(mortal.socket, "small"))
        try:
            await pool.open()
            await nothing_is_left(mortal.socket, marker)
            assert mortal.mounts() == []
        finally:
            await pool.close()


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
async def test_an_engine_that_dies_is_nobodys_fault_and_its_return_makes_new_runtimes(
    mortal: Daemon, ends: signal.Signals, marker: str
) -> None:
    pool = RuntimePool(config_of(mortal.socket, "small"))
    try:
        runtime = await pool.start("host")
        idle = await pool.start("host")
        assert await said(runtime, f"(sleep {marker} &) && echo works") == "works"
        running = asyncio.ensure_future(sh(runtime, "sleep 20"))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(mortal.signal, ends)
        with pytest.raises(RuntimeLost, match="is gone"):
            await running
        with pytest.raises(RuntimeLost, match="is gone"):
            await said(idle, "echo works")
        await asyncio.gather(runtime.stop(), idle.stop())
        with pytest.raises(RuntimeLost, match="cannot be started: the container engine at"):
            await pool.start("host")
        await asyncio.to_thread(mortal.start)
        fresh = await pool.start("host")
        assert await said(fresh, "echo works") == "works"
        assert len(await ids(mortal.socket)) == 1, "what could not be removed has been since"
    finally:
        await pool.close()
    await nothing_is_left(mortal.socket, marker)


async def test_a_containerd_that_is_killed_leaves_nothing_and_makes_nobody_guilty(mortal: Daemon, marker: str) -> None:
    if not isinstance(mortal, DockerDaemon):
        pytest.skip("Podman has no containerd")
    pool = RuntimePool(config_of(mortal.socket, "small"))
    try:
        runtime = await pool.start("host")
        running = asyncio.ensure_future(sh(runtime, f"sleep {marker}", wall_s=5))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(mortal.kill_containerd)
        (end,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(end, CommandEnd | RuntimeLost), "it went on, or was lost"
        await runtime.stop()
        await nothing_is_left(mortal.socket, marker)
        assert await said(await pool.start("host"), "echo works") == "works"
    finally:
        await pool.close()
    await nothing_is_left(mortal.socket, marker)


class MortalEnvironment(ComputerEnvironment):
    """Its engine is killed while the command `last` runs."""

    kill: ClassVar[Callable[[], None]]

    async def step(self, action: Action) -> Step:
        if not any(call.arguments.get("command") == "last" for call in action.calls):
            return await super().step(action)
        stepping = asyncio.ensure_future(super().step(action))
        await asyncio.to_thread(MortalEnvironment.kill)
        return await stepping


async def test_a_lease_of_a_killed_engine_is_given_back_as_nobodys_fault_and_succeeds_when_it_is_back(
    mortal: Daemon, marker: str, tasks: Path, tmp_path: Path
) -> None:
    MortalEnvironment.kill = lambda: mortal.signal(signal.SIGKILL)
    entry = {"source": f"{__name__}:MortalEnvironment", "name": "computer"}
    options = {"train_file": str(tasks), "tools": ["shell", "submit"]}
    extra = list(catalog.build([ClassTasks.model_validate({**entry, "options": options})]).values())
    granted = lease(environment="computer", group_size=2).model_copy(
        update={"sampling": Sampling(max_tokens=400), "timeout_s": 200.0}
    )
    model = model_with("chatml", tmp_path)
    dies: Calls = [("shell", {"command": f"(sleep {marker} &)"}), ("shell", {"command": "last"}), ("submit", {})]
    waits: Calls = [("shell", {"command": f"(sleep {marker} &)"}), ("shell", {"command": "sleep 15"}), ("submit", {})]
    pool = use_runtimes(RuntimePool(config_of(mortal.socket, "small")))
    pool.settle()
    try:
        async with benches(model) as bench:
            made = await bench(TrajectoryCalls(model, dies, waits), extra=extra, environment_timeout_s=100.0)
            lost = await made.failed(granted)
            assert (lost.data_fault, "is gone: the container engine at" in lost.reason) == (False, True), lost

            await asyncio.to_thread(mortal.start)
            await nothing_is_left(mortal.socket, marker)  # although nobody starts another one

            made = await bench(TrajectoryCalls(model, SOLVES, SOLVES), extra=extra, environment_timeout_s=100.0)
            again = (await made.finished(granted.model_copy(update={"attempt": 1}))).group.trajectories
            assert [each.reward.reward for each in again] == [1.0, 1.0]
    finally:
        await pool.close()
    await nothing_is_left(mortal.socket, marker)
    assert mortal.mounts() == []


def settings_of(kind: str, socket: Path, learner: str) -> str:
    return f"""
[env-service]
model = "/headway"
learner = "{learner}"
http.port = 0

[env-service.runtimes]
kind = "{kind}"
spare = 0
limits = {{ memory_mib = 128, disk_mib = 8 }}

[env-service.runtimes.engine]
socket = "{socket}"
images = {{ host = "headway/test-base" }}

[[env-service.environments]]
source = "computer"
name = "computer"

[env-service.environments.options]
train_file = "/headway/tasks.jsonl"
tools = ["shell", "submit"]
"""


def service_of(docker: TriedEngine, folder: Path) -> dict[str, object]:
    """An env_service in a container, by its sources and packages here, walled in as docker-compose.yml has it."""
    seccomp = ROOT / "deploy/sandbox/seccomp.json"
    return {
        "image": docker.image, "network_mode": "host", "user": "10001:10001", "read_only": True, "cap_drop": ["ALL"],
        "group_add": [str(docker.socket.stat().st_gid)],
        "security_opt": ["no-new-privileges", f"seccomp={seccomp}", "systempaths=unconfined"],
        "tmpfs": ["/tmp:exec,mode=1777"], "stop_grace_period": "60s", "working_dir": "/headway",
        "environment": {"PYTHONPATH": "/sources:/packages", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"},
        "entrypoint": ["python3", "-c", "from env_service.command import main; main()"],
        "command": ["--config", "/headway/run.toml"],
        "volumes": [
            f"{ROOT}:/sources:ro", f"{installed_packages()}:/packages:ro", f"{folder}:/headway:ro",
            f"{docker.socket}:{docker.socket}",
        ],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["engine", "bubblewrap"])
async def test_docker_compose_down_leaves_nothing_of_the_runtimes_of_its_env_service(
    kind: str, docker: TriedEngine, engine: ContainerEngine, marker: str, tasks: Path, tmp_path: Path
) -> None:
    model = model_with("chatml", tmp_path)
    generator = ScriptedCompletions(TrajectoryCalls(model, [("shell", {"command": f"sleep {marker}"})]))
    (tmp_path / "stack.yml").write_text(yaml.safe_dump({"services": {"env-service": service_of(docker, tmp_path)}}))
    project = Project(engine, f"hwdown-{uuid.uuid4().hex[:8]}", [tmp_path / "stack.yml"], {})
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*") as router,
        served(generator.handle, "/v1/generate") as generator_url,
    ):
        (tmp_path / "run.toml").write_text(settings_of(kind, docker.socket, router.address))
        await asyncio.to_thread(run, ["chmod", "-R", "a+rX", str(tmp_path)], timeout_s=20)
        learner = ScriptedLearner(router)
        try:
            await asyncio.to_thread(project, "up", "--detach")
            await learner.expect(Hello, within_s=60)
            learner.answer = Welcome(run="r", incarnation=1, heartbeat_every_s=0.1)
            await learner.say(learner.answer, Fleet(generators=(serving("g0", generator_url),)))
            granted = lease(5, environment="computer", group_size=1)
            sampling = Sampling(max_tokens=400)
            await learner.grant(granted.model_copy(update={"timeout_s": 200.0, "sampling": sampling}))
            await eventually(lambda: sleepers(marker), within_s=120)
            assert bool(await ids(docker.socket, running=True)) == (kind == "engine")
        finally:
            print(await asyncio.to_thread(project, "logs", "--no-color"))
            await asyncio.to_thread(project, "down")
    assert await ids(docker.socket) == []
    assert sleepers(marker) == []
    assert project.containers() == []
