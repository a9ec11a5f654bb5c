"""Runtimes that are pods, against a small API server: not run in a cluster."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from env_service.runtimes import kubernetes_runtime
from env_service.runtimes.config import KubernetesConfig, RuntimeLimits, RuntimesConfig
from env_service.runtimes.images import ImageFault
from env_service.runtimes.interface import (
    CommandEnd,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeFile,
    RuntimeLost,
    RuntimeRefused,
    RuntimeSnapshot,
)
from env_service.runtimes.kinds import PooledRuntime
from env_service.runtimes.kubernetes_kind import LABEL, KubernetesKind
from env_service.runtimes.kubernetes_runtime import KubernetesRuntime
from env_service.runtimes.pool import RuntimePool
from services.isolation.faults import CannotIsolate
from tests.env_service.peers import eventually
from tests.env_service.runtimes.kubernetes_server import StandInCluster, StandInPod, stand_in_cluster

LIMITS = RuntimeLimits(memory_mib=128, disk_mib=1, command_s=20)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[StandInCluster]:
    (tmp_path / "token").write_text("secret\n")
    async with stand_in_cluster(tmp_path) as made:
        yield made


def config_of(server: StandInCluster, tmp_path: Path, **changed: object) -> RuntimesConfig:
    told = {"api": server.url, "account": tmp_path, "namespace": "lab", "service": "east"}
    settings = KubernetesConfig.model_validate({**told, "user": f"{os.getuid()}:{os.getgid()}", **changed})
    return RuntimesConfig(kind="kubernetes", spare=0, limits=LIMITS, kubernetes=settings)


@pytest.fixture
async def kind(cluster: StandInCluster, tmp_path: Path) -> AsyncIterator[KubernetesKind]:
    made = KubernetesKind(config_of(cluster, tmp_path))
    await made.open({"image"})
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_runtime, "_TOLD_OF_END_S", 0.1)


Launch = Callable[..., Awaitable[tuple[KubernetesRuntime, StandInPod]]]


@pytest.fixture
async def launch(kind: KubernetesKind, cluster: StandInCluster) -> AsyncIterator[Launch]:
    """Launches runtimes, each with its pod, and stops them."""
    made: list[KubernetesRuntime] = []

    async def launched(snapshot: RuntimeSnapshot | None = None) -> tuple[KubernetesRuntime, StandInPod]:
        runtime = await kind.launch("image", snapshot, name="test", ended=_ignored)
        made.append(runtime)
        return runtime, list(cluster.pods.values())[-1]

    yield launched
    await asyncio.gather(*(each.stop() for each in made))


def _ignored(_runtime: PooledRuntime) -> None:
    """Nobody counts."""


async def sh(runtime: KubernetesRuntime, line: str, *, wall_s: float = 20.0) -> CommandEnd:
    return await runtime.exec(RuntimeCommand(argv=("sh", "-c", line), wall_s=wall_s))


async def test_commands_have_output_an_end_and_limits(launch: Launch) -> None:
    runtime, pod = await launch()
    end = await runtime.exec(
        RuntimeCommand(argv=("sh", "-c", "cat; echo $A >&2; exit 3"), stdin=b"in\n", environment={"A": "b c"})
    )
    assert (end.exit_code, end.stdout, end.stderr, end.cut) == (3, b"in\n", b"b c\n", False)
    much = await runtime.exec(RuntimeCommand(argv=("head", "-c", "99999", "/dev/zero"), output_bytes=1024))
    assert (len(much.stdout), much.cut) == (1024, True)
    slow = await sh(runtime, "echo begun; sleep 60 & sleep 61", wall_s=1.0)
    assert (slow.timed_out, slow.exit_code, slow.stdout) == (True, None, b"begun\n")
    assert any(order.isdigit() for order in pod.orders), "its first process is told whom to kill"
    with pytest.raises(RuntimeRefused, match="write it into a file"):
        await sh(runtime, "x" * 200_000)
    pod.orders.clear()
    given_up = asyncio.ensure_future(sh(runtime, "sleep 60"))
    await eventually(lambda: pod.running)
    given_up.cancel()
    await eventually(lambda: not pod.running)
    assert any(order.isdigit() for order in pod.orders), "also if its process was not known yet"


async def test_files_go_in_and_out_and_a_fork_begins_with_them(launch: Launch) -> None:
    runtime, pod = await launch()
    await runtime.copy_in({"work/a/one": RuntimeFile(b"1", 0o640), "work/a/link": RuntimeFile(link="one")})
    await sh(runtime, "echo new > '/work/n w'; rm -r /etc/issue /etc/kept; echo file > /etc/kept; mkdir b; chmod 700 b")
    left = {"a/one": RuntimeFile(b"1", 0o640), "a/link": RuntimeFile(b"", 0o777, "one"), "n w": RuntimeFile(b"new\n")}
    assert await runtime.copy_out("work") == left
    assert await runtime.copy_out("work/a/link") == {"": RuntimeFile(b"1", 0o640)}, "a link is followed"
    for path, why in (("none", "No such file"), ("a\0b", "UTF-8")):
        with pytest.raises(RuntimeRefused, match=f"cannot be read: .*{why}"):
            await runtime.copy_out(path)
    with pytest.raises(RuntimeRefused, match="work cannot be read: more than 3 bytes"):
        await runtime.copy_out("work", most_bytes=3)
    with pytest.raises(RuntimeRefused, match="No space left"):
        await runtime.copy_in({"work/big": bytes(2 << 20)})
    snapshot = await runtime.snapshot()
    assert {(kind, path) for kind, path, *_ in snapshot.entries} == {
        ("folder", "etc"), ("whiteout", "etc/issue"), ("file", "etc/kept"), ("folder", "work"), ("folder", "work/a"),
        ("folder", "work/b"), ("file", "work/a/one"), ("link", "work/a/link"), ("file", "work/n w"),
    }  # fmt: skip
    fork, other = await launch(snapshot)
    assert other is not pod
    assert await fork.copy_out("work") == left
    assert (await sh(fork, "ls /etc; cat /etc/kept")).stdout == b"kept\nfile\n"
    assert oct((other.root / "work/b").stat().st_mode & 0o777) == "0o700"


async def test_walls_are_asked_for(launch: Launch) -> None:
    _, pod = await launch()
    assert pod.manifest["metadata"]["labels"] == {LABEL: "east"}
    spec = pod.manifest["spec"]
    assert (spec["automountServiceAccountToken"], spec["restartPolicy"]) == (False, "Never")
    assert spec["activeDeadlineSeconds"] == 3600 + 3600
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (container["securityContext"]["allowPrivilegeEscalation"], container["stdinOnce"]) == (False, True)
    assert container["resources"]["limits"] == {"memory": "128Mi", "cpu": "1000m", "ephemeral-storage": "1Mi"}
    assert "volumes" not in spec


async def test_why_a_pod_ended_is_told_apart(launch: Launch, cluster: StandInCluster) -> None:
    async def breaks(pod: StandInPod) -> None:
        pod.break_stdin()

    async def deleted(pod: StandInPod) -> None:
        pod.manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await pod.end(137)

    async def late(pod: StandInPod) -> None:
        pod.attached, attached = set(), pod.attached
        await pod.end(137, pod_reason="Evicted", message="a node that tells of it late")
        await asyncio.sleep(0.4)
        for socket in attached:
            await socket.close()

    cases: list[tuple[Callable[[StandInPod], Awaitable[None]], type[Exception], str]] = [
        (breaks, RuntimeLost, "its stdin broke"),
        (deleted, RuntimeLost, "its pod was taken away"),
        (late, RuntimeLost, "tells of it late"),
        # Whoever is inside can have its first process end so.
        (lambda pod: pod.end(99), RuntimeEnded, "it was ended from inside"),
        (lambda pod: pod.end(137), RuntimeEnded, "it was ended from inside"),
        (lambda pod: pod.end(0), RuntimeEnded, "it was ended from inside"),
        (lambda pod: pod.end(137, reason="OOMKilled"), RuntimeEnded, "it had no memory left"),
        (
            lambda pod: pod.end(137, pod_reason="Evicted", message="The node was low on resource: memory."),
            RuntimeLost,
            "Evicted The node was low",
        ),
        (
            lambda pod: pod.end(137, pod_reason="Evicted", message="The node was low on resource: ephemeral-storage."),
            RuntimeLost,
            "Evicted The node was low",
        ),
        (
            lambda pod: pod.end(137, pod_reason="Evicted", message="Pod ephemeral local storage usage exceeds"),
            RuntimeEnded,
            "it wrote too much",
        ),
        (lambda pod: pod.end(137, pod_reason="DeadlineExceeded"), RuntimeEnded, "its time was over"),
    ]
    for end, error, why in cases:
        runtime, pod = await launch()
        running = asyncio.ensure_future(sh(runtime, "sleep 60"))
        await eventually(partial(bool, pod.running))
        await end(pod)
        with pytest.raises(error, match=why):
            await running
        with pytest.raises(error, match=why):
            await runtime.copy_out("work")
    runtime, pod = await launch()
    await pod.end(137)
    cluster.pods.clear()
    with pytest.raises(RuntimeLost, match="not found"):
        await runtime.snapshot()


async def test_room_is_made_for_a_command_that_cannot_start_and_then_it_is_the_runtimes_end(
    launch: Launch, cluster: StandInCluster
) -> None:
    runtime, pod = await launch()
    cluster.cannot_start = ["OCI runtime exec failed: resource temporarily unavailable"]
    assert (await sh(runtime, "echo works")).stdout == b"works\n"
    assert "all" in pod.orders
    cluster.cannot_start = ["OCI runtime exec failed: no /bin/sh"] * 2
    with pytest.raises(RuntimeEnded, match="no command can be started in it any more"):
        await sh(runtime, "true")
    other, _ = await launch()
    cluster.cannot_start = ["the node does not answer"]
    with pytest.raises(RuntimeLost, match="the node does not answer"):
        await sh(other, "true")


async def test_an_api_server_that_dies_is_nobodys_fault_and_what_it_kept_is_deleted_when_it_is_back(
    kind: KubernetesKind, launch: Launch, cluster: StandInCluster
) -> None:
    runtime, pod = await launch()
    running = asyncio.ensure_future(sh(runtime, "sleep 60"))
    await eventually(partial(bool, pod.running))
    await cluster.die()
    with pytest.raises(RuntimeLost, match="is gone"):
        await running
    await runtime.stop()
    with pytest.raises(RuntimeLost, match="cannot be started"):
        await launch()
    (left,) = cluster.pods
    await cluster.start()
    other, _ = await launch()
    assert left in cluster.deleted
    assert (await sh(other, "echo works")).stdout == b"works\n"


async def test_a_pod_that_cannot_be_deleted_keeps_nobody_from_a_runtime(
    launch: Launch, cluster: StandInCluster
) -> None:
    runtime, _ = await launch()
    (kept,) = cluster.pods
    cluster.kept[kept] = 503
    await runtime.stop()
    with pytest.raises(RuntimeLost, match="cannot be started"):  # an API server that is busy refuses no single pod
        await launch()
    cluster.kept[kept] = 500
    other, _ = await launch()
    assert kept in cluster.pods
    assert (await sh(other, "echo works")).stdout == b"works\n"


async def test_leftovers_of_this_service_are_deleted_at_the_start_and_no_others(
    cluster: StandInCluster, tmp_path: Path
) -> None:
    for name, labels in (("mine", {LABEL: "east"}), ("west", {LABEL: "west"}), ("other", {"app": "east"})):
        cluster.make({"metadata": {"name": name, "labels": labels}})
    cluster.make({"metadata": {"name": "kept", "labels": {LABEL: "east"}}})
    cluster.kept["kept"] = 500
    kind = KubernetesKind(config_of(cluster, tmp_path))
    await kind.open(set())
    await kind.close()
    assert (cluster.deleted, sorted(cluster.pods)) == (["mine"], ["kept", "other", "west"])


async def test_what_is_missing_is_said_at_the_start(cluster: StandInCluster, tmp_path: Path) -> None:
    config = config_of(cluster, tmp_path)
    with pytest.raises(ImageFault, match=r"which no pod has: .*kubernetes.images.host = \"IMAGE\""):
        RuntimePool(config).need("host")
    pool = RuntimePool(config)
    pool.need("image")
    with pytest.raises(CannotIsolate, match=r"the walls of runtimes do not hold here: .*it has capabilities"):
        await pool.open()
    (tmp_path / "token").write_text("another")
    with pytest.raises(CannotIsolate, match=r"pods cannot be had: pods is forbidden.*pods/exec"):
        await pool.open()


def test_a_runtimes_pod_is_valid_and_belongs_to_the_services(tmp_path: Path) -> None:
    settings = KubernetesConfig(service="east-0", owner_uid="1-2-3", runtime_class="gvisor", images={"host": "py:1"})
    kind = KubernetesKind(RuntimesConfig(kind="kubernetes", kubernetes=settings))
    pod = json.loads(json.dumps(kind.pod("headway-1", "host")))
    assert pod["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "east-0", "uid": "1-2-3"}]
    assert (pod["spec"]["runtimeClassName"], pod["spec"]["containers"][0]["image"]) == ("gvisor", "py:1")
    assert pod["spec"]["containers"][0]["securityContext"]["runAsNonRoot"] is True
