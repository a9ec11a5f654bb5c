"""Runtimes by a real container engine: they do as a computer does, their walls hold, and deaths are told apart."""

import asyncio
import io
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from env_service.builtin import computer_check
from env_service.runtimes.config import ContainerEngineConfig
from env_service.runtimes.interface import (
    RuntimeCommand,
    RuntimeEnded,
    RuntimeFile,
    RuntimeLost,
    RuntimeRefused,
)
from env_service.runtimes.pool import RuntimePool, use_runtimes
from services.isolation.faults import CannotIsolate
from tests.deploy.containers import EngineImpossible
from tests.deploy.daemons import RootlessPodmanDaemon, started
from tests.deploy.on_engines import LIMITS, TriedEngine, config_of, ids, info_of, said, sh, small_image
from tests.env_service.runtimes.attacks import (
    FIRST_ENDS_AS_IF_KILLED,
    FORKING_SHELLS,
    FORKS,
    KILL_ALL,
    PROBE,
    SIGNALS_TO_THE_FIRST,
)
from tests.env_service.task_sets.conftest import FIX, task, with_pytest, worked

pytestmark = pytest.mark.compose

ROOT = Path(__file__).resolve().parents[2]


MORE = """
tries("the engine's bridge", lambda: reached(socket.AF_INET, ("172.17.0.1", port)))
for path in sys.argv[3:]:
    tries(f"the file {path}", lambda path=path: os.stat(path))
    tries(f"the socket {path}", lambda path=path: reached(socket.AF_UNIX, path))
for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
    # By crun the folder is a file system in memory, in which folders are no cgroups.
    tries(
        f"a cgroup in {folder}",
        lambda folder=folder: os.mkdir(folder + "/mine") or os.path.exists(folder + "/mine/cgroup.procs"),
    )
tries("keys of the kernel", lambda: libc.syscall(250, 0, -3, 0) >= 0)
su = subprocess.Popen(["/bin/su", "root"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if "\\t0\\t" in next(line for line in open(f"/proc/{su.pid}/status") if line.startswith("Uid:")): print("setuid")
su.kill()
looks_for(mine, "/")
"""


@pytest.fixture
def socket_of(tried: TriedEngine) -> Path:
    """The engine's socket."""
    return tried.socket


@pytest.fixture
def python_image(tried: TriedEngine) -> str:
    """An image with python3."""
    return tried.image


@pytest.fixture
async def pool(socket_of: Path, python_image: str) -> AsyncIterator[RuntimePool]:
    made = RuntimePool(config_of(socket_of, python_image))
    yield made
    await made.close()


async def test_commands_have_output_an_end_and_limits(pool: RuntimePool) -> None:
    runtime = await pool.start("host")
    end = await runtime.exec(
        RuntimeCommand(
            argv=("sh", "-c", "cat; pwd; echo $WHO >&2; exit 3"), stdin=b"in\n", cwd="/tmp", environment={"WHO": "me"}
        )
    )
    assert (end.exit_code, end.stdout, end.stderr) == (3, b"in\n/tmp\n", b"me\n")
    large = await runtime.exec(RuntimeCommand(argv=("wc", "-c"), stdin=b"x" * (3 << 20)))
    assert large.stdout == b"3145728\n"
    slow = await sh(runtime, "sleep 60 & exec sleep 61", wall_s=0.3)
    assert (slow.timed_out, slow.exit_code, slow.wall_s < 10) == (True, None, True)
    assert await said(runtime, "cat /proc/[0-9]*/comm | grep -c sleep") == "0", "all of its group was killed"
    mute = await sh(runtime, "exec >/dev/null 2>&1; sleep 60", wall_s=0.3)
    assert mute.timed_out
    much = await runtime.exec(RuntimeCommand(argv=("sh", "-c", "yes | head -c 100000"), output_bytes=1024))
    assert (len(much.stdout), much.cut) == (1024, True)
    assert (await runtime.exec(RuntimeCommand(argv=("no-such-program",)))).exit_code == 127
    assert (await runtime.exec(RuntimeCommand(argv=("true",), cwd="/no/such/folder"))).exit_code == 126
    assert await said(runtime, "(sleep 60 &); echo left") == "left", "what a command leaves does not hold it up"
    assert await said(runtime, "cat /proc/[0-9]*/comm | grep -c sleep") == "1", "and goes on"
    with pytest.raises(RuntimeRefused, match="write it into a file"):
        await runtime.exec(RuntimeCommand(argv=("echo", "x" * 200_000)))


async def test_files_go_in_and_out_and_a_fork_begins_with_them(pool: RuntimePool) -> None:
    runtime = await pool.start("host")
    await runtime.copy_in({"work/a/one": b"1", "/work/run": RuntimeFile(b"#!/bin/sh\necho ran\n", 0o4755)})
    changes = (
        "./run; cat a/one; rm a/one; rm -rf .config; ln -s /etc/passwd link; ln run 'a/hard link'; mkdir b; mkfifo p"
    )
    assert await said(runtime, f"{changes}; chmod 700 a; rmdir /home/agent && echo x > '/tmp/a file'") == (
        "ran\n1rmdir: failed to remove '/home/agent': Permission denied"
    )
    left = {
        "run": RuntimeFile(b"#!/bin/sh\necho ran\n", 0o755),
        "a/hard link": RuntimeFile(b"#!/bin/sh\necho ran\n", 0o755),
        "link": RuntimeFile(b"", 0o777, "/etc/passwd"),
    }
    assert await runtime.copy_out("work") == left, "nothing is set-user-id, and the pipe is no file"
    assert await runtime.copy_out("/work/run") == {"": left["run"]}
    await sh(runtime, "echo x > '/tmp/a file'")
    snapshot = await runtime.snapshot()
    assert {(kind, path) for kind, path, *_ in snapshot.entries} == {
        ("folder", "home"), ("folder", "home/agent"), ("folder", "tmp"), ("folder", "work"), ("folder", "work/a"),
        ("folder", "work/b"), ("file", "tmp/a file"), ("file", "work/a/hard link"), ("link", "work/link"),
        ("file", "work/run"),
    }  # fmt: skip
    fork = await pool.start("host", snapshot=snapshot)
    await sh(runtime, "echo later > /work/later")
    assert await fork.copy_out("work") == left
    assert await said(fork, "stat -c '%a %u %n' /work/a /tmp /work/b; cat '/tmp/a file'; ./run") == (
        "700 1000 /work/a\n1777 0 /tmp\n755 1000 /work/b\nx\nran"
    )
    assert (await fork.snapshot()).entries == snapshot.entries, "a fork of a fork is the same"
    assert await said(await pool.start("host"), "ls /work") == "", "the image is as it was"
    with pytest.raises(RuntimeRefused, match="work/none cannot be read: No such file"):
        await runtime.copy_out("work/none")
    with pytest.raises(RuntimeRefused, match="No space left"):
        await runtime.copy_in({"work/big": bytes(9 << 20)})
    await sh(runtime, "head -c 2000 /dev/zero > /work/more")
    with pytest.raises(RuntimeRefused, match="more than 1000 bytes"):
        await runtime.copy_out("/work", most_bytes=1000)


async def test_what_is_removed_or_replaced_of_the_image_is_so_in_a_fork(socket_of: Path, python_image: str) -> None:
    engine = ContainerEngineConfig(socket=socket_of, images={"host": python_image}, user="0:0")
    pool = RuntimePool(config_of(socket_of, python_image, engine=engine))
    try:
        runtime = await pool.start("host")
        await sh(runtime, "rm /etc/issue; rm -rf /etc/apt; rm -rf /etc/dpkg; mkdir /etc/dpkg; echo new > /etc/dpkg/new")
        await sh(runtime, "rm -rf /etc/cron.daily; echo file > /etc/cron.daily; echo changed > /etc/debian_version")
        fork = await pool.start("host", snapshot=await runtime.snapshot())
        looked = (
            "ls /etc/issue /etc/apt 2>&1 | grep -c 'No such'; ls /etc/dpkg; cat /etc/cron.daily /etc/debian_version"
        )
        assert await said(fork, looked) == "2\nnew\nfile\nchanged"
        assert await said(fork, "python3 -c 'print(6 * 7)'") == "42"
    finally:
        await pool.close()


async def test_bombs_end_with_their_command_or_their_runtime_and_hurt_nobody_else(pool: RuntimePool) -> None:
    attacked, other = await pool.start("host"), await pool.start("host")
    end = await sh(attacked, "python3 -c 'x = b\"x\" * (300 << 20)'")
    assert (end.starved, end.exit_code == 0) == (True, False)
    bombing = asyncio.ensure_future(sh(attacked, FORKS, wall_s=2))
    assert await said(other, "sleep 0.5; echo works") == "works"
    assert (await bombing).timed_out
    await sh(attacked, "for i in 1 2 3; do (setsid sleep 1000 >/dev/null 2>&1 &); done; " + FORKING_SHELLS, wall_s=2)
    assert await said(attacked, "echo works") == "works"
    filled = "import os, signal\nfor _ in range(60):\n  try:\n    if os.fork() == 0: os.setsid(); signal.pause()\n"
    filled += "  except OSError: pass"
    await sh(attacked, f'python3 -c "{filled}" >/dev/null 2>&1')
    assert await said(attacked, "echo works") == "works", "room is made for a command"
    assert (await sh(attacked, "head -c 9000000 /dev/zero > /work/full")).exit_code != 0, (
        "no file is larger than the disk"
    )
    with pytest.raises(RuntimeEnded, match="it wrote more than 8 MiB"):
        await sh(attacked, "for i in 1 2 3; do head -c 7000000 /dev/zero > /work/$i; done; sleep 15")
    assert await said(other, "echo works") == "works"


async def test_nothing_of_the_machine_or_of_others_is_reached(
    pool: RuntimePool, socket_of: Path, tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o755)
    (tmp_path / "host-file").write_text("of the host")
    mine, other = await pool.start("host"), await pool.start("host")
    await other.copy_in({"work/marker-of-another": b"x", "tmp/marker-of-another": b"x"})
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0headway-test")
        abstract.listen()
        await mine.copy_in({"work/probe.py": (PROBE + MORE).encode()})
        outside = f"{tmp_path}/host-file {socket_of} /var/run/docker.sock /run/containerd/containerd.sock"
        end = await sh(mine, f"python3 probe.py {server.getsockname()[1]} marker-of-another {outside}")
    assert (end.exit_code, end.stdout) == (0, b""), end


async def test_links_lead_nowhere_but_inside(pool: RuntimePool, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    outside = tmp_path / "victim"
    outside.write_text("as it was")
    runtime = await pool.start("host")
    await sh(runtime, f"ln -s {outside} out; ln -s ../../../..{tmp_path} up; ln -s /proc/1/root/etc root; mkfifo pipe")
    for path in ("work/out", "work/up/victim", "work/root/none"):
        with pytest.raises(RuntimeRefused, match="No such file"):
            await runtime.copy_out(path)
    for path in ("up/victim", "root/changed"):
        with suppress(RuntimeRefused):  # or it is written inside, as by Podman
            await runtime.copy_in({f"work/{path}": b"changed"})
    assert (outside.read_text(), os.path.exists("/etc/changed")) == ("as it was", False)  # noqa: ASYNC240
    with pytest.raises(RuntimeRefused, match="neither a file nor a folder"):
        await runtime.copy_out("work/pipe")
    with pytest.raises(RuntimeRefused, match=r"without '\.\.'"):
        await runtime.copy_in({"work/../../x": b""})
    with pytest.raises(RuntimeRefused, match="UTF-8"):
        await runtime.copy_out("/work/\ud800")
    # The folder that a command begins in is entered inside, with nothing of the engine open.
    await sh(runtime, "rm -rf /work/cwd; ln -s /proc/self/fd/7 /work/cwd; ln -s /proc/self/fd/8 /work/cwd8")
    for name in ("cwd", "cwd8"):
        end = await runtime.exec(RuntimeCommand(argv=("ls", "../../../../"), cwd=f"/work/{name}"))
        assert (end.exit_code, end.stdout) == (126, b"")
    await runtime.copy_in({"work/out": b"changed"})
    assert (await said(runtime, "cat out"), outside.read_text()) == ("changed", "as it was")


async def test_a_runtime_that_is_killed_is_lost_and_one_that_ended_itself_has_ended(
    pool: RuntimePool, tried: TriedEngine, socket_of: Path
) -> None:
    for ending in (("kill",), ("rm", "--force")):
        runtime = await pool.start("host")
        running = asyncio.ensure_future(sh(runtime, "sleep 20"))
        await asyncio.sleep(0.3)
        (container,) = await ids(socket_of)
        await asyncio.to_thread(tried.command, *ending, container)
        with pytest.raises(RuntimeLost, match="is gone"):
            await running
        with pytest.raises(RuntimeLost, match="is gone"):
            await runtime.snapshot()
        await runtime.stop()
    runtime = await pool.start("host")
    signals = f"{SIGNALS_TO_THE_FIRST}; echo all > /proc/1/fd/1"
    assert await said(runtime, f"{signals}; echo alive") == "alive"
    assert (await sh(runtime, f"sleep 50 & {KILL_ALL}; sleep 20")).exit_code == 137
    assert await said(runtime, "echo alive; cat /proc/[0-9]*/stat | grep -c ' Z '") == "alive\n0"
    await runtime.copy_in({"work/end.py": FIRST_ENDS_AS_IF_KILLED.encode()})
    with pytest.raises(RuntimeEnded, match="it was ended from inside"):
        await sh(runtime, "python3 end.py; kill -CHLD 1; echo > /proc/1/fd/0; sleep 20")
    await runtime.stop()
    assert await ids(socket_of) == []


async def test_an_ordinary_users_engine_that_ignores_limits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with started(RootlessPodmanDaemon) as daemon:
            if await asyncio.to_thread(lambda: info_of(daemon.socket).CgroupVersion) != "1":
                pytest.skip("with cgroups of version 2 an ordinary user may have limits")
            imported = await asyncio.to_thread(daemon, "import", "-", "small", stdin=small_image())
            assert imported.returncode == 0, imported
            pool = RuntimePool(config_of(daemon.socket, "small"))
            pool.need("host")
            with pytest.raises(CannotIsolate, match=r"it ignores the limits .* ordinary user on cgroups of version 1"):
                await pool.open()
            assert await ids(daemon.socket) == []
            words = [
                "runtime",
                "check",
                f"{ROOT}/examples/computer/repairs.jsonl",
                "--kind",
                "engine",
                "--image",
                "small",
            ]
            words += ["--socket", str(daemon.socket)]
            assert await asyncio.to_thread(computer_check.main, words) == 2
            assert "it ignores the limits of containers" in capsys.readouterr().err
    except EngineImpossible as error:
        pytest.skip(f"no Podman of an ordinary user: {error}")


def test_committed_tasks_are_solved_by_their_solutions_in_containers(
    socket_of: Path, python_image: str, tmp_path: Path
) -> None:
    tasks = (ROOT / "examples/computer/repairs.jsonl").read_text().splitlines(keepends=True)[:2]
    (tmp_path / "repairs.jsonl").write_text("".join(tasks))
    words = ["runtime", "check", f"{tmp_path}/repairs.jsonl", "--image", python_image]
    out = io.StringIO()
    assert computer_check.main([*words, "--kind", "engine", "--socket", str(socket_of)], out=out) == 0, out.getvalue()
    assert out.getvalue() == "2 of 2 tasks are solved by their solution, and not without\n"


async def test_work_on_a_repository_is_judged_by_tests_in_a_fresh_container(socket_of: Path, python_image: str) -> None:
    limits = LIMITS.model_copy(update={"memory_mib": 192, "disk_mib": 32})
    pool = use_runtimes(RuntimePool(config_of(socket_of, python_image, limits=limits)))
    try:
        solved = await worked(with_pytest(task(), copied=True), FIX)
        assert (solved.reward, solved.work.outside) == (1.0, ()), solved
        assert (await worked(with_pytest(task(), copied=True), "rm -rf tests; echo > shop/sums.py")).reward == 0.0
    finally:
        await pool.close()
