"""Harnesses inside of their task's computer: what they do there is judged, and nobody but their session is reached."""

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from env_service.environments.imported import EnvironmentFault, offered
from env_service.environments.task_configs import ClassTasks
from env_service.harnesses import catalog
from env_service.harnesses.drivers import driving
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from protocol.messages import FailedLease
from tests.env_service.harnesses.conftest import COUNT, HarnessRun, turns_of
from tests.env_service.runtimes.conftest import SMALL, keepers
from tests.process_ends import all_end, children_of

SOLVES = "grep -c ^ERROR app.log > answer.txt; echo done"


@pytest.fixture(autouse=True)
def plain_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "drivers"
    shutil.copytree(Path(driving.__file__).parent, folder)
    folder.chmod(0o777)  # and is not writable inside all the same
    shutil.copy(Path(__file__).with_name("plain_driver.py"), folder)
    monkeypatch.setattr(catalog.KnownHarness, "driver", folder / "plain_driver.py")


def options(**settings: Any) -> dict[str, Any]:
    given = {"harness": "anthropic", "python": sys.executable, "settings": settings, "environ": {"DRIVERS": "."}}
    return {**given, "inside": True}


async def test_a_harness_inside_is_judged_by_what_it_does_and_trained_on_what_was_sampled(
    rolled_out: HarnessRun,
) -> None:
    ended = await rolled_out(options(turns=2), ["cat app.log", SOLVES])

    (trajectory,) = ended.trajectories
    assert (trajectory.reward.reward, trajectory.stop_reason) == (1.0, "solved")
    assert "ERROR a" in ended.policy.prompts[1]
    assert list(turns_of(trajectory)) == list(zip(ended.policy.shown, ended.policy.sampled, strict=True))
    assert len(ended.bench.sessions) == 0


# Prints a line for all that it can do and should not.
PROBE = """
import glob, json, os, socket, sys, threading, time, urllib.request
port = PORT
door = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
mine = ("127.0.0.1", int(door.rpartition(":")[2]))
def status(method, path, body=b"{}"):
    request = urllib.request.Request(door + path, body if method == "POST" else None, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer: return answer.status
    except urllib.error.HTTPError as error: return error.code
for name, address in (("metadata", ("169.254.169.254", 80)), ("the service", ("127.0.0.1", port))):
    with socket.socket() as s:
        s.settimeout(2)
        if s.connect_ex(address) == 0: print("reached", name)
for method, path in (("POST", "/reward"), ("POST", "/commands"), ("POST", "/v1/sessions"), ("GET", "/metrics")):
    if status(method, path, b'{"reward": 1.0, "command": "true"}') != 404: print("reached", method, path)
if status("GET", "/v1/models") != 200: print("no session")
for name in glob.glob("/proc/[0-9]*/environ"):
    if b"hw-" in open(name, "rb").read(): print("the key in", name)
for folder in ("packages", "drivers", "python/bin", "python/lib"):
    for place in glob.glob("/opt/harness/*/" + folder):
        if os.access(place, os.W_OK): print("can write into", place)
def flood(until=time.time() + 1.0):
    held = []
    while time.time() < until:
        try: held.append(socket.create_connection(mine, 0.1)); held[-1].send(b"x")
        except OSError: held.clear()
threads = [threading.Thread(target=flood) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print("done" if status("GET", "/v1/models") == 200 else "no session after a flood")
"""


async def test_from_inside_nothing_is_reached_but_the_policy(rolled_out: HarnessRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = PROBE.replace("PORT", str(server.getsockname()[1]))
        ended = await rolled_out(options(probe=probe), [SOLVES])

    assert "user\ndone\n<|im_end|>" in ended.policy.prompts[0], ended.policy.prompts[0]
    assert ended.trajectories[0].reward.reward == 1.0


async def test_killing_a_harness_inside_costs_its_trajectory_alone(rolled_out: HarnessRun) -> None:
    killed: list[int] = []

    def kill(_number: int) -> None:
        if not killed:
            inside = [pid for keeper in keepers() for pid in children_of(keeper)]
            killed.append(next(pid for pid in inside if b"plain_driver" in Path(f"/proc/{pid}/cmdline").read_bytes()))
            os.kill(killed[0], signal.SIGKILL)

    ended = await rolled_out(options(), [SOLVES], before=kill, group_size=2)

    assert [each.reward.reward for each in ended.trajectories if each.reward.error is None] == [1.0]
    faults = {"environment": "agent", "kind": "crashed"}
    assert ended.bench.metrics.registry.get_sample_value("headway_env_service_environment_faults_total", faults) == 1.0


async def test_a_harness_whose_computer_is_lost_or_over_ends_as_one_beside_it(rolled_out: HarnessRun) -> None:
    lost = await rolled_out(options(turns=5), ["true"], before=lambda _: os.kill(keepers()[0], signal.SIGKILL))
    assert isinstance(lost.outcome, FailedLease)
    assert not lost.outcome.data_fault, lost.outcome.reason

    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=SMALL.model_copy(update={"lifetime_s": 1.0}))))
    try:
        (trajectory,) = (await rolled_out(options(turns=5), ["sleep 10"])).trajectories
    finally:
        await pool.close()
    assert (trajectory.reward.reward, trajectory.stop_reason) == (0.0, "computer_ended")


async def test_a_harness_that_hangs_inside_is_ended_with_all_that_it_started(rolled_out: HarnessRun) -> None:
    pids: list[int] = []

    def note(_number: int) -> None:
        pids.extend(keepers())
        pids.extend(pid for keeper in keepers() for pid in children_of(keeper))

    ended = await rolled_out({**options(hangs=True), "timeout_s": 3.0}, [SOLVES], before=note)

    assert isinstance(ended.outcome, FailedLease)
    assert "anthropic was not done within 3 s" in ended.outcome.reason
    assert pids
    assert all_end(pids)
    assert len(ended.bench.sessions) == 0


@pytest.mark.parametrize("kind", ["engine", "kubernetes"])
@pytest.mark.parametrize("harness", catalog.HARNESSES)
def test_runtimes_of_other_kinds_have_no_inside_for_a_harness(
    tmp_path: Path, harness: catalog.HarnessName, kind: Literal["engine", "kubernetes"]
) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(COUNT))
    given = {**options(), "harness": harness, "tasks": {"computer": {"train_file": str(tmp_path / "tasks.jsonl")}}}
    use_runtimes(RuntimePool(RuntimesConfig(kind=kind)))
    refused = f"{harness} with inside = true needs env-service.runtimes.kind = 'bubblewrap'.*got '{kind}'"
    try:
        with pytest.raises(EnvironmentFault, match=refused):
            offered(ClassTasks(source="harness", name="mine", options=given))
    finally:
        use_runtimes(RuntimePool(RuntimesConfig()))
