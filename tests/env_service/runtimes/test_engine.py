"""Runtimes by an engine, against a small one that answers like Docker: calls, faults, and whose doing they are."""

import asyncio
import errno
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from env_service.runtimes import engine_api, engine_commands, engine_kind
from env_service.runtimes.config import PODMAN_SECCOMP, ContainerEngineConfig, RuntimeLimits, RuntimesConfig
from env_service.runtimes.engine_kind import LABEL, EngineKind, label_of
from env_service.runtimes.engine_runtime import EngineRuntime
from env_service.runtimes.images import ImageFault
from env_service.runtimes.interface import (
    CommandEnd,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeFile,
    RuntimeLost,
    RuntimeRefused,
)
from env_service.runtimes.kinds import PooledRuntime
from env_service.runtimes.pool import RuntimePool
from services.isolation import owners
from services.isolation.faults import CannotIsolate
from services.isolation.owners import Owner
from tests.env_service.peers import eventually
from tests.env_service.runtimes.engine_server import StandInContainer, StandInEngine, stand_in

SANDBOX_SECCOMP = Path(__file__).parents[3] / "deploy/sandbox/seccomp.json"
LIMITS = RuntimeLimits(memory_mib=128, disk_mib=1, files=100, processes=24, command_s=20, lifetime_s=3600)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[StandInEngine]:
    async with stand_in(tmp_path) as made:
        yield made


def config_of(server: StandInEngine, **changed: object) -> RuntimesConfig:
    settings = ContainerEngineConfig(socket=server.socket, user=f"{os.getuid()}:{os.getgid()}")
    return RuntimesConfig(kind="engine", spare=0, limits=LIMITS, engine=settings).model_copy(update=changed)


@pytest.fixture
async def kind(engine: StandInEngine) -> AsyncIterator[EngineKind]:
    made = EngineKind(config_of(engine))
    await made.open({"image"})
    yield made
    await made.close()


Launch = Callable[[], Awaitable[tuple[EngineRuntime, StandInContainer]]]


@pytest.fixture
async def launch(kind: EngineKind, engine: StandInEngine) -> AsyncIterator[Launch]:
    """Launches runtimes, each with its container, and stops them."""
    made: list[EngineRuntime] = []

    async def launched() -> tuple[EngineRuntime, StandInContainer]:
        runtime = await kind.launch("image", None, name="test", ended=_ignored)
        made.append(runtime)
        return runtime, engine.containers[runtime.container]

    yield launched
    await asyncio.gather(*(each.stop() for each in made))


def _ignored(_runtime: PooledRuntime) -> None:
    """Nobody counts."""


def _is_over(pid: int) -> bool:
    """True of a process that has ended, or is about to be taken in."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return True


async def sh(runtime: EngineRuntime, line: str, *, wall_s: float = 20.0) -> CommandEnd:
    return await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-c", line), cwd=".", wall_s=wall_s))


async def test_commands_have_output_an_end_and_limits(launch: Launch) -> None:
    runtime, container = await launch()
    end = await runtime.exec(
        RuntimeCommand(argv=("sh", "-c", "cat; echo $A >&2; exit 3"), stdin=b"in\n", environment={"A": "b=c"}, cwd=".")
    )
    assert (end.exit_code, end.stdout, end.stderr, end.cut) == (3, b"in\n", b"b=c\n", False)
    much = await runtime.exec(RuntimeCommand(argv=("sh", "-c", "yes | head -c 99999"), output_bytes=1024, cwd="."))
    assert (len(much.stdout), much.cut, much.stderr) == (1024, True, b"")
    slow = await sh(runtime, "echo begun; sleep 60 & sleep 61", wall_s=0.2)
    assert (slow.timed_out, slow.exit_code, slow.signal, slow.stdout) == (True, None, 9, b"begun\n")
    assert any(order.isdigit() for order in container.orders), "its first process is told whom to kill"
    assert (await sh(runtime, "exec >&- 2>&-; sleep 0.1; exit 4")).exit_code == 4, "it may print nothing any more"
    with pytest.raises(RuntimeRefused, match="write it into a file"):
        await sh(runtime, "x" * 200_000)


async def test_a_command_that_is_given_up_is_killed_also_before_its_process_is_known(
    launch: Launch, engine: StandInEngine
) -> None:
    runtime, container = await launch()
    for begun in (lambda: any(each.endswith("start") for each in engine.asked), lambda: container.running):
        container.orders.clear()
        engine.asked.clear()
        running = asyncio.ensure_future(sh(runtime, "sleep 60"))
        await eventually(begun)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: container.orders and not container.running)
        assert any(order.isdigit() for order in container.orders)


async def test_a_command_for_which_the_engine_makes_no_group_is_killed_with_all_that_it_started(
    launch: Launch, engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_commands, "_STOP_S", 1.0)
    engine.makes_groups = False
    runtime, _ = await launch()
    slow = await sh(runtime, "sleep 60 & echo $!; exec sleep 61", wall_s=0.5)
    assert (slow.timed_out, slow.exit_code) == (True, None)
    await eventually(lambda: _is_over(int(slow.stdout)))
    assert (await sh(runtime, "cat; exit 3")).exit_code == 3
    assert (await runtime.exec(RuntimeCommand(argv=("no-such-program",), cwd="."))).exit_code == 127


async def test_files_go_in_and_out_and_what_differs_is_a_snapshot(
    launch: Launch, kind: EngineKind, engine: StandInEngine
) -> None:
    runtime, container = await launch()
    await runtime.copy_in({"work/a/one": RuntimeFile(b"1", 0o640), "work/a/link": RuntimeFile(link="one")})
    (container.root / "work/changed").write_bytes(b"new")
    os.mkfifo(container.root / "work/pipe")
    assert await runtime.copy_out("work") == {
        "a/one": RuntimeFile(b"1", 0o640), "a/link": RuntimeFile(b"", 0o777, "one"), "changed": RuntimeFile(b"new")
    }  # fmt: skip
    assert await runtime.copy_out("work/a/link") == {"": RuntimeFile(b"1", 0o640)}, "a link is followed"
    for path, why in (("none", "No such file"), ("work/pipe", "neither a file"), ("a\0b", "UTF-8")):
        with pytest.raises(RuntimeRefused, match=f"cannot be read: .*{why}"):
            await runtime.copy_out(path)
    with pytest.raises(RuntimeRefused, match="work cannot be read: more than 3 bytes"):
        await runtime.copy_out("work", most_bytes=3)
    with pytest.raises(RuntimeRefused, match="No space left"):
        await runtime.copy_in({"work/big": bytes(2 << 20)})

    told = {"/work": 0, "/work/a": 1, "/work/a/one": 1, "/work/a/link": 1, "/work/changed": 0, "/etc/gone": 2,
            "/home": 2, "/etc/hosts": 0, "/dev/null": 1}  # fmt: skip
    container.changes = [{"Path": path, "Kind": what} for path, what in told.items()]
    snapshot = await runtime.snapshot()
    assert snapshot.entries == (
        ("whiteout", "etc/gone", 0, b""), ("folder", "home", 0o755, b"y"), ("folder", "work", 0o755, b""),
        ("folder", "work/a", 0o755, b""), ("link", "work/a/link", 0o777, b"one"), ("file", "work/a/one", 0o640, b"1"),
        ("file", "work/changed", 0o644, b"new"),
    )  # fmt: skip
    container.changes.append({"Path": "/work/large", "Kind": 1})
    (container.root / "work/large").write_bytes(bytes(2 << 20))
    with pytest.raises(RuntimeRefused, match="no snapshot can be taken: more than 1048576 bytes"):
        await runtime.snapshot()


@pytest.mark.parametrize("is_podman", [True, False])
async def test_a_user_whom_podman_names_is_in_no_snapshot_but_what_a_task_lays_there_is(
    engine: StandInEngine, is_podman: bool
) -> None:
    engine.is_podman = is_podman
    usual = config_of(engine)
    kind = EngineKind(usual.model_copy(update={"engine": usual.engine.model_copy(update={"user": "1000:1000"})}))
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    container = engine.containers[runtime.container]
    for name in ("passwd", "group"):
        (container.root / "etc").mkdir(exist_ok=True)
        (container.root / "etc" / name).write_bytes(b"the engine's")
    container.changes = [{"Path": f"/etc{path}", "Kind": 0} for path in ("", "/passwd", "/group")]
    theirs = [entry[1] for entry in (await runtime.snapshot()).entries]
    await runtime.copy_in({"/etc/passwd": b"the task's"})
    begun = await runtime.snapshot()
    again = await kind.launch("image", begun, name="test", ended=_ignored)
    engine.containers[again.container].changes = container.changes[:2]
    assert theirs == ([] if is_podman else ["etc", "etc/group", "etc/passwd"])
    for snapshot in (begun, await again.snapshot()):
        assert ("file", "etc/passwd", 0o644, b"the task's") in snapshot.entries
    await asyncio.gather(runtime.stop(), again.stop())
    await kind.close()


async def test_walls_are_asked_for(launch: Launch) -> None:
    _, container = await launch()
    host = container.settings["HostConfig"]
    assert isinstance(host, dict)
    expected = {
        "NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "Privileged": False,
        "Memory": 128 << 20, "MemorySwap": 128 << 20, "PidsLimit": 24 + 16, "NanoCpus": 10**9, "IpcMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
    }  # fmt: skip
    assert {name: host[name] for name in expected} == expected
    assert "Binds" not in host
    assert "Mounts" not in host
    asked = container.settings
    assert (asked["Image"], asked["User"]) == ("sha256:image", f"{os.getuid()}:{os.getgid()}")
    assert (asked["NetworkDisabled"], asked["StdinOnce"], asked["Env"]) == (True, True, ["HOME=/home/agent"])
    assert "StorageOpt" not in host, "this storage cannot"


async def test_podman_is_given_a_filter_without_namespaces(engine: StandInEngine) -> None:
    engine.is_podman = True
    kind = EngineKind(config_of(engine))
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    host = engine.containers[runtime.container].settings["HostConfig"]
    assert isinstance(host, dict)
    assert host["SecurityOpt"] == ["no-new-privileges", f"seccomp={PODMAN_SECCOMP}"]
    await runtime.stop()
    await kind.close()
    given, sandbox = (json.loads(path.read_text()) for path in (PODMAN_SECCOMP, SANDBOX_SECCOMP))
    assert given["defaultAction"] == "SCMP_ACT_ERRNO"
    assert given["syscalls"][2:] == sandbox["syscalls"][1:], "the sandboxes' but for what bubblewrap needs"
    clone, clone3 = given["syscalls"][:2]
    no_namespaces = {"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    assert (clone["names"], clone["action"], clone["args"]) == (["clone"], "SCMP_ACT_ALLOW", [no_namespaces])
    assert (clone3["names"], clone3["action"], clone3["errnoRet"]) == (["clone3"], "SCMP_ACT_ERRNO", errno.ENOSYS)


async def test_storage_that_limits_a_disk_is_asked_to(engine: StandInEngine) -> None:
    engine.refuses_quota = False
    kind = EngineKind(config_of(engine))
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    host = engine.containers[runtime.container].settings["HostConfig"]
    assert isinstance(host, dict)
    assert host["StorageOpt"] == {"size": "1M"}
    await runtime.stop()
    await kind.close()
    assert not engine.containers, "the probe is gone, too"


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_kind, "_DISK_LOOK_S", 0.01)
    monkeypatch.setattr(engine_kind, "_LEFT_ALONE", 0)


@pytest.mark.usefixtures("quick_looks")
async def test_what_writes_too_much_is_ended(launch: Launch) -> None:
    runtime, container = await launch()
    container.written = 1 << 20
    other, _ = await launch()
    running = asyncio.ensure_future(sh(runtime, "sleep 60"))
    await eventually(lambda: bool(container.running))
    container.written += 1
    with pytest.raises(RuntimeEnded, match="it wrote more than 1 MiB"):
        await running
    third, container = await launch()
    container.changes = [{"Path": f'/work/{each}"Kind":', "Kind": 1} for each in range(100)]
    running = asyncio.ensure_future(sh(third, "sleep 60"))
    await eventually(lambda: bool(container.running))
    container.changes.append({"Path": "/work/one more", "Kind": 1})
    with pytest.raises(RuntimeEnded, match="it made more than 100 files"):
        await running
    assert (await sh(other, "echo works")).stdout == b"works\n"


def counts(engine: StandInEngine) -> int:
    """Number of times that it was asked for changes."""
    return sum(each.endswith("/changes") for each in engine.asked)


@pytest.mark.usefixtures("quick_looks")
async def test_a_container_that_cannot_be_counted_keeps_no_other_from_being_looked_at(
    launch: Launch, engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [await launch() for _ in range(2)]
    monkeypatch.setattr(engine_api, "ANSWER_S", 0.3)
    engine.asked.clear()
    await eventually(lambda: counts(engine) > 1)  # so that none is waited for as before
    engine.counts_all = False
    for _, container in made:
        container.changes = [{"Path": f"/work/{each}", "Kind": 1} for each in range(101)]
    await eventually(lambda: not all(runtime.stands for runtime, _ in made))
    assert [runtime.container for runtime, _ in made if runtime.stands] == [engine.uncounted]


@pytest.mark.usefixtures("quick_looks")
async def test_an_engine_that_has_counted_files_is_left_alone_but_for_sizes(
    launch: Launch, engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_kind, "_LEFT_ALONE", 1e9)
    runtime, container = await launch()
    await eventually(lambda: counts(engine))
    await asyncio.sleep(0.1)
    assert counts(engine) == 1

    container.written = 2 << 20
    await eventually(lambda: not runtime.stands)


async def test_why_a_container_ended_is_told_apart(launch: Launch, engine: StandInEngine) -> None:
    await engine.heard()
    cases: list[tuple[Callable[[StandInContainer], None], type[Exception], str]] = [
        (lambda container: container.end(137), RuntimeLost, "its container was killed"),
        # Whoever is inside can have its first process end so.
        (lambda container: container.end(137), RuntimeEnded, "it was ended from inside"),
        (lambda container: container.end(0), RuntimeEnded, "it was ended from inside"),
        (lambda container: container.end(139), RuntimeEnded, "it was ended from inside"),
        (lambda container: container.end(137, killed_for_memory=True), RuntimeEnded, "it had no memory left"),
    ]
    for end, error, why in cases:
        runtime, container = await launch()
        running = asyncio.ensure_future(sh(runtime, "sleep 60"))
        await eventually(partial(bool, container.running))
        end(container)
        if error is RuntimeLost:
            await engine.tell("kill", runtime.container)
        with pytest.raises(error, match=why):
            await running
        with pytest.raises(error, match=why):
            await runtime.copy_out("work")
        assert not runtime.stands
    runtime, container = await launch()
    del engine.containers[runtime.container]
    with pytest.raises(RuntimeLost, match="No such container"):
        await runtime.snapshot()


async def test_one_whose_end_is_seen_before_its_removal_was_not_ended_from_inside(
    launch: Launch, engine: StandInEngine
) -> None:
    await engine.heard()
    runtime, container = await launch()
    running = asyncio.ensure_future(sh(runtime, "sleep 60"))
    await eventually(partial(bool, container.running))
    container.end(137)  # of which Podman tells no kill
    state = f"GET /v1.41/containers/{runtime.container}/json"
    await eventually(lambda: state in engine.asked)
    del engine.containers[runtime.container]
    # By its first process's end, or by the command's: the command looks for itself what became of the container.
    with pytest.raises(RuntimeLost, match=r"is gone: (its container was killed or removed|No such container)"):
        await running


async def test_a_kill_for_want_of_memory_is_told_of_the_command_and_is_not_the_cause_of_a_later_death(
    launch: Launch, engine: StandInEngine
) -> None:
    runtime, container = await launch()
    await engine.heard()
    running = asyncio.ensure_future(sh(runtime, "kill -9 $$"))
    await eventually(lambda: "json" in engine.asked[-1] and "/exec/" in engine.asked[-1])
    await engine.tell("oom", runtime.container)
    end = await running
    assert (end.starved, end.signal, end.exit_code) == (True, 9, None)
    later = await sh(runtime, "kill -9 $$")
    assert (later.starved, later.exit_code) == (False, 137)
    await engine.tell("kill", runtime.container)
    container.end(137, killed_for_memory=True)
    with pytest.raises(RuntimeLost, match="its container was killed"):
        await sh(runtime, "true")


async def test_room_is_made_for_a_command_that_cannot_start_and_then_it_is_the_runtimes_end(
    launch: Launch, engine: StandInEngine
) -> None:
    runtime, container = await launch()
    engine.cannot_start = ["OCI runtime exec failed: resource temporarily unavailable"]
    assert (await sh(runtime, "echo works")).stdout == b"works\n"
    assert "all" in container.orders
    engine.cannot_start = ["OCI runtime exec failed: no /bin/sh"] * 2
    with pytest.raises(RuntimeEnded, match=r"no command can be started in it any more: .*no /bin/sh"):
        await sh(runtime, "true")
    other, _ = await launch()
    engine.cannot_start = ["the disk of the engine is full"] * 2
    with pytest.raises(RuntimeLost, match="is given up: the disk of the engine is full"):
        await sh(other, "true")
    third, _ = await launch()
    engine.cannot_start, engine.started_pid = ["the words of another shell than the image's"] * 2, 17
    with pytest.raises(RuntimeEnded, match="no command can be started in it any more: the words of"):
        await sh(third, "true")


@pytest.mark.parametrize(("there", "expected"), [(["16", "17"], RuntimeEnded), (["16"], RuntimeLost)])
async def test_a_command_of_which_the_engine_has_lost_track_is_nobodys_fault(
    launch: Launch,
    engine: StandInEngine,
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    expected: type[Exception],
) -> None:
    monkeypatch.setattr(engine_commands, "_STOP_S", 0.2)
    runtime, _ = await launch()
    engine.hears_no_ends, engine.started_pid, engine.processes = True, 17, [[each] for each in there]
    with pytest.raises(expected):
        await sh(runtime, "true", wall_s=0.1)


async def test_podman_says_by_stderr_that_a_command_cannot_start(engine: StandInEngine) -> None:
    engine.is_podman = True
    kind = EngineKind(config_of(engine))
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    engine.cannot_start = ["Error: runc: exec failed: resource temporarily unavailable: OCI runtime error"]
    assert (await sh(runtime, "echo works")).stdout == b"works\n"
    engine.cannot_start = ["Error: runc: exec failed: no /bin/sh: OCI runtime error"] * 2
    with pytest.raises(RuntimeEnded, match=r"no command can be started in it any more: Error: .*no /bin/sh"):
        await sh(runtime, "true")
    await runtime.stop()
    await kind.close()


async def test_an_engine_that_dies_is_nobodys_fault_and_what_it_kept_is_removed_when_it_is_back(
    kind: EngineKind, launch: Launch, engine: StandInEngine
) -> None:
    runtime, container = await launch()
    running = asyncio.ensure_future(sh(runtime, "sleep 60"))
    await eventually(lambda: bool(container.running))
    await engine.die()
    with pytest.raises(RuntimeLost, match="the container engine"):
        await running
    await runtime.stop()
    with pytest.raises(RuntimeLost, match="cannot be started: the container engine at"):
        await launch()
    assert list(engine.containers) == [runtime.container]
    await engine.start()
    other, _ = await launch()
    assert list(engine.containers) == [other.container]
    assert (await sh(other, "echo works")).stdout == b"works\n"


async def test_what_an_engine_kept_is_removed_when_it_is_back_although_nobody_starts_another(
    launch: Launch, engine: StandInEngine
) -> None:
    runtime, _ = await launch()
    await engine.die()
    await runtime.stop()
    assert list(engine.containers) == [runtime.container]
    await engine.start()
    await eventually(lambda: not engine.containers)


async def test_what_nobody_removed_is_looked_for_again_and_again(
    engine: StandInEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_kind, "_SWEEP_S", 0.05)
    mine = Owner.this()
    elsewhere = label_of(replace(mine, namespace=mine.namespace + 1, started=1))
    kind = EngineKind(config_of(engine))
    await kind.open(set())
    of_others = dict.fromkeys(("ended", "running", "made"), elsewhere)
    labels = {**of_others, "paused": elsewhere, "lost": label_of(mine), "fresh": label_of(mine)}
    made = {name: engine.make(name, {"Labels": {LABEL: label}}) for name, label in labels.items()}
    engine.containers[made["ended"]].state = "exited"
    engine.containers[made["running"]].state = "running"
    for name, state in (("paused", "paused"), ("lost", "created")):
        engine.containers[made[name]].state, engine.containers[made[name]].created = state, int(time.time()) - 3600
    engine.stuck.add(made["lost"])
    await eventually(lambda: engine.asked.count(f"DELETE /v1.41/containers/{made['lost']}") > 1)
    assert [made["lost"] in each.message for each in caplog.records].count(True) == 1, "it is said once"
    engine.stuck.clear()
    await eventually(lambda: len(engine.containers) == 4)
    await kind.close()
    assert set(engine.removed) == {made["ended"], made["lost"]}


async def test_a_lifetime_ends_a_runtime(engine: StandInEngine) -> None:
    kind = EngineKind(config_of(engine, limits=LIMITS.model_copy(update={"lifetime_s": 0.3})))
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    runtime.age_from_now()
    with pytest.raises(RuntimeEnded, match=r"its time was over after 0.3 s"):
        await sh(runtime, "sleep 60")
    await runtime.stop()
    await kind.close()


async def test_a_start_that_is_given_up_or_whose_answer_is_lost_leaves_no_container(
    kind: EngineKind, launch: Launch, engine: StandInEngine
) -> None:
    engine.making.clear()
    starting = asyncio.ensure_future(launch())
    await eventually(lambda: engine.asked[-1].endswith("create"))
    starting.cancel()
    await asyncio.sleep(0)
    engine.making.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not engine.containers
    engine.loses_answers = True
    with pytest.raises(RuntimeLost, match="cannot be started"):
        await launch()
    assert len(engine.containers) == 1
    engine.loses_answers = False
    runtime, _ = await launch()
    assert list(engine.containers) == [runtime.container]


async def test_a_container_that_the_engine_does_not_remove_keeps_nobody_from_a_runtime(
    engine: StandInEngine, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Owner.this()
    gone = label_of(replace(mine, started=mine.started + 1))
    engine.stuck = {engine.make(name, {"Labels": {LABEL: gone}}) for name in ("one", "two")}
    kind = EngineKind(config_of(engine))
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    engine.stuck.add(runtime.container)
    await runtime.stop()
    other = await kind.launch("image", None, name="test", ended=_ignored)
    assert (await sh(other, "echo works")).stdout == b"works\n"
    assert sum("is left for now" in message for message in caplog.messages) == 3
    await other.stop()
    await kind.close()


async def test_an_engine_that_tells_of_nothing_is_not_asked_without_a_pause(engine: StandInEngine) -> None:
    engine.ends_events, began = True, time.monotonic()
    kind = EngineKind(config_of(engine))
    await kind.open({"image"})
    await engine.heard()
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    await sh(runtime, "true")
    await runtime.stop()
    took_s = time.monotonic() - began
    await kind.close()
    assert sum(asked.endswith("/events") for asked in engine.asked) <= 1 + took_s


async def test_podman_is_not_taken_with_another_oci_runtime_than_it_runs_containers_with(engine: StandInEngine) -> None:
    usual = config_of(engine)
    asks = usual.model_copy(update={"engine": usual.engine.model_copy(update={"oci_runtime": "runsc"})})
    engine.is_podman = True
    kind, said = EngineKind(asks), r"oci_runtime is 'runsc', and Podman runs all containers with 'runc'; .*conf"
    with pytest.raises(CannotIsolate, match=said):
        await kind.open(set())
    await kind.close()
    for told, is_podman in (("runsc", True), ("runc", False)):  # Docker is told for each container
        engine.info["DefaultRuntime"], engine.is_podman = told, is_podman
        kind = EngineKind(asks)
        await kind.open(set())
        await kind.close()


@pytest.mark.parametrize(("version", "found"), [(os.uname().release, True), ("another", False)])
async def test_only_a_kernel_of_its_own_spares_a_container_the_filter_and_the_limits(
    engine: StandInEngine, version: str, found: bool
) -> None:
    usual = config_of(engine)
    named = usual.model_copy(update={"engine": usual.engine.model_copy(update={"oci_runtime": "crun"})})
    engine.info["KernelVersion"] = version
    kind = EngineKind(named)
    await kind.open({"image"})
    runtime = await kind.launch("image", None, name="test", ended=_ignored)
    said = (await runtime.exec(replace(kind.trial, cwd="."))).stdout.decode()
    await runtime.stop()
    await kind.close()
    assert ("there is no filter of system calls" in said) == ("its memory is not limited" in said) == found, said


async def test_leftovers_of_services_that_have_ended_are_removed_and_no_others(engine: StandInEngine) -> None:
    mine, parent = Owner.this(), os.getppid()
    living = replace(mine, pid=parent, started=owners._started(parent) or 0)
    gone, elsewhere = replace(mine, started=mine.started + 1), replace(mine, namespace=mine.namespace + 1, started=1)
    of_another_machine = f"{gone.mark}@another"
    made = {
        name: engine.make(name, {"Labels": {label: value}})
        for name, label, value in (
            ("gone", LABEL, label_of(gone)), ("living", LABEL, label_of(mine)),
            ("elsewhere", LABEL, label_of(elsewhere)), ("of another machine", LABEL, of_another_machine),
            ("ended", LABEL, label_of(elsewhere)), ("ended there", LABEL, of_another_machine),
            ("the living one's ended", LABEL, label_of(living)), ("somebody's", "other", label_of(gone)),
            ("somebody's of that label", LABEL, "theirs"),
        )
    }  # fmt: skip
    for name in ("gone", "living", "elsewhere", "of another machine"):
        engine.containers[made[name]].state = "running"
    for name in ("ended", "ended there", "the living one's ended", "somebody's of that label"):
        engine.containers[made[name]].created = int(time.time()) - 3600
    kind = EngineKind(config_of(engine))
    await kind.open(set())
    await kind.close()
    assert set(engine.removed) == {made["gone"], made["ended"], made["ended there"]}


async def test_what_is_missing_is_said_at_the_start(engine: StandInEngine, tmp_path: Path) -> None:
    nowhere = ContainerEngineConfig(socket=tmp_path / "none.sock")
    pool = RuntimePool(RuntimesConfig(kind="engine", engine=nowhere))
    pool.need("python:3.11-slim")
    with pytest.raises(CannotIsolate, match=r"kind is 'engine', and no container engine answers: .*none.sock.*; start"):
        await pool.open()
    with pytest.raises(ImageFault, match=r"'host' is this machine's own programs.*engine.images.host = \"IMAGE\""):
        pool.need("host")
    engine.images["disk"] = {"Id": "sha256:disk", "Config": {"Volumes": {"/data": {}}}}
    for image, why in (("absent", "has no image 'absent': pull"), ("disk", r"has volumes \(/data\)")):
        pool = RuntimePool(config_of(engine))
        pool.need(image)
        with pytest.raises(ImageFault, match=why):
            await pool.open()
    pool = RuntimePool(config_of(engine, engine=ContainerEngineConfig(socket=engine.socket, user="4711:4711")))
    pool.need("image")
    with pytest.raises(CannotIsolate, match=r"the walls of runtimes do not hold here: it runs as user"):
        await pool.open()
    assert not engine.containers
    engine.info["CgroupDriver"] = "none"
    with pytest.raises(
        CannotIsolate, match=r"the container engine at .* is not taken: it limits nothing of a container"
    ):
        await RuntimePool(config_of(engine)).open()
    engine.info["SecurityOptions"] = ["name=seccomp,profile=unconfined"]
    with pytest.raises(CannotIsolate, match="filters no system calls"):
        await RuntimePool(config_of(engine)).open()
