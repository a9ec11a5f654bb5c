"""A runtime does as a computer does, and its death is told apart: from inside, or from elsewhere."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from env_service.runtimes.asking import bounds
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.interface import (
    Runtime,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeFile,
    RuntimeLost,
    RuntimeRefused,
)
from env_service.runtimes.pool import RuntimePool
from tests.env_service.peers import eventually
from tests.env_service.runtimes.attacks import (
    FIRST_ENDS_AS_IF_KILLED,
    FIRST_HAS_ITSELF_KILLED,
    KILL_ALL,
    SIGNALS_TO_THE_FIRST,
)
from tests.env_service.runtimes.conftest import SMALL, forge, keepers, said, sh
from tests.process_ends import all_end, children_of


async def test_commands_have_output_an_end_and_limits(runtime: Runtime) -> None:
    end = await runtime.exec(RuntimeCommand(argv=("sh", "-c", "cat; pwd; echo $WHO >&2; exit 3"), stdin=b"in\n",
                                     cwd="/tmp", environment={"WHO": "me"}))  # fmt: skip
    assert (end.exit_code, end.stdout, end.stderr) == (3, b"in\n/tmp\n", b"me\n")
    slow = await sh(runtime, "sleep 60", wall_s=0.3)
    assert (slow.timed_out, slow.exit_code) == (True, None)
    much = await runtime.exec(RuntimeCommand(argv=("sh", "-c", "yes | head -c 100000"), output_bytes=1024))
    assert (len(much.stdout), much.cut) == (1024, True)
    assert (await runtime.exec(RuntimeCommand(argv=("no-such-program",)))).exit_code == 127
    assert await said(runtime, "(sleep 60 &); echo left") == "left", "what a command leaves does not hold it up"
    assert await said(runtime, "nice") == str(min(19, os.nice(0) + 10)), "it never stands in the service's way"
    with pytest.raises(RuntimeRefused, match="write it into a file"):
        await runtime.exec(RuntimeCommand(argv=("echo", "x" * 200_000)))


async def test_limits_of_the_settings_are_those_of_a_command_that_has_none_and_the_most_of_one_that_has() -> None:
    limits = SMALL.model_copy(update={"output_bytes": 1 << 17, "command_s": 600.0})
    pool = RuntimePool(RuntimesConfig(spare=0, limits=limits))
    try:
        runtime = await pool.start("host")
        for asked, kept in ((None, 1 << 17), (1 << 20, 1 << 17), (2048, 2048)):
            end = await runtime.exec(RuntimeCommand(argv=("head", "-c", "200000", "/dev/zero"), output_bytes=asked))
            assert (len(end.stdout), end.cut) == (kept, True)
        for trusted, shown in ((False, b"1\n2\n3\n"), (True, b"0000\n")):
            command = RuntimeCommand(argv=("seq", "1", "100000"), output_bytes=len(shown), trusted=trusted)
            assert (await runtime.exec(command)).stdout == shown, "the end of what a program of the service's prints"
    finally:
        await pool.close()
    for wall_s, most_s in ((None, 600.0), (1000.0, 600.0), (5.0, 5.0)):
        assert bounds(RuntimeCommand(argv=("true",), wall_s=wall_s), limits)[0] == most_s
    assert bounds(RuntimeCommand(argv=("true",), wall_s=1000.0, output_bytes=1 << 20, trusted=True), limits) == (
        1000.0,
        1 << 20,
    )


async def test_files_go_in_and_out_and_a_fork_begins_with_them(pool: RuntimePool, runtime: Runtime) -> None:
    await runtime.copy_in({"work/a/one": b"1", "/work/run": RuntimeFile(b"#!/bin/sh\necho ran\n", 0o755)})
    assert await said(runtime, "./run; cat a/one; rm a/one; rm /etc/hosts; ln -s /etc/passwd link") == "ran\n1"
    assert await runtime.copy_out("work") == {
        "run": RuntimeFile(b"#!/bin/sh\necho ran\n", 0o755),
        "link": RuntimeFile(b"", 0o777, "/etc/passwd"),
    }
    fork = await pool.start("host", snapshot=await runtime.snapshot())
    await sh(runtime, "echo later > /work/later")
    assert await said(fork, "ls /work; ls /etc/hosts") == (
        "a\nlink\nrun\nls: cannot access '/etc/hosts': No such file or directory"
    )
    assert await said(await pool.start("host"), "ls /work; ls /etc/hosts") == "/etc/hosts", "the image is as it was"
    with pytest.raises(RuntimeRefused, match="work/none cannot be read: No such file"):
        await runtime.copy_out("work/none")
    with pytest.raises(RuntimeRefused, match="No space left"):
        await runtime.copy_in({"work/big": bytes(9 << 20)})


async def test_why_a_runtime_ended_is_heard_of_though_a_command_was_on_its_way(pool: RuntimePool) -> None:
    runtime = await pool.start("host")
    (keeper,) = keepers()
    (monitor,) = children_of(keeper)
    (first,) = children_of(monitor)
    os.kill(keeper, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: b") Z" in Path(f"/proc/{first}/stat").read_bytes())
    running = asyncio.ensure_future(sh(runtime, "true"))
    await asyncio.sleep(0.1)
    os.kill(keeper, signal.SIGCONT)
    with pytest.raises(RuntimeLost, match="its first process was killed"):
        await running


async def test_a_runtime_that_is_killed_is_lost_and_one_that_ended_itself_has_ended(pool: RuntimePool) -> None:
    killed = await pool.start("host")
    (monitor,) = children_of(keepers()[0])
    os.kill(children_of(monitor)[0], signal.SIGKILL)
    with pytest.raises(RuntimeLost, match="its first process was killed"):
        await sh(killed, "sleep 20")
    await killed.stop()

    without = await pool.start("host")
    running = asyncio.ensure_future(sh(without, "sleep 20"))
    await asyncio.sleep(0.2)
    inside = children_of(keepers()[0])
    os.kill(keepers()[0], signal.SIGKILL)
    with pytest.raises(RuntimeLost, match="its keeper has died"):
        await running
    assert all_end(inside)
    await without.stop()

    other = await pool.start("host")
    os.kill(forge(), signal.SIGKILL)
    with pytest.raises(RuntimeLost, match="its keeper has died"):
        await sh(other, "sleep 20")
    await other.stop()

    ended = await pool.start("host")
    await runtime_stays(ended)
    await ended.copy_in({"work/end.py": FIRST_ENDS_AS_IF_KILLED.encode()})
    with pytest.raises(RuntimeEnded, match="it was ended from inside"):
        await sh(ended, "python3 end.py; kill -CHLD 1; sleep 20")

    spent = await pool.start("host")
    await spent.copy_in({"work/end.py": FIRST_HAS_ITSELF_KILLED.encode()})
    with pytest.raises(RuntimeEnded, match="it was ended from inside"):
        await sh(spent, "python3 end.py; kill -CHLD 1; sleep 20")


async def runtime_stays(runtime: Runtime) -> None:
    """Signals from inside end everything but the runtime."""
    await sh(runtime, SIGNALS_TO_THE_FIRST)
    assert (await sh(runtime, f"sleep 50 & {KILL_ALL}; sleep 20", wall_s=2)).exit_code != 0
    # The first process takes them up when it has its turn, which is a little later on a busy machine.
    until_none = "for i in $(seq 100); do ps ax -o stat | grep -q Z || break; sleep 0.1; done"
    assert await said(runtime, f"{until_none}; echo alive; ps ax -o stat | grep -c Z") == "alive\n0"


async def test_an_answer_that_nobody_waits_for_leaves_no_descriptor(runtime: Runtime) -> None:
    await runtime.copy_in({"work/file": b"x" * 1000})
    assert await said(runtime, "cat file") == "x" * 1000

    def descriptors() -> int:
        links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum("headway-tree" in os.readlink(link) for link in links if link.is_symlink())

    await runtime.copy_out("/work")
    before = descriptors()
    for _ in range(3):
        copying = asyncio.ensure_future(runtime.copy_out("/work"))
        await asyncio.sleep(0)  # it is asked for
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
    await runtime.copy_out("/work")  # answered after the others

    assert descriptors() == before
