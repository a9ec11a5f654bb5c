"""Contract of every sandbox with programs that mean no harm."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
import pytest_asyncio

from reward_service.sandbox.pool import SandboxPool, open_sandboxes
from reward_service.verifier.program import ExecutionConfig, InterpreterConfig, Program, RunLimits, SandboxKind
from reward_service.verifier.submission import UserError

KINDS = tuple(kind for kind in get_args(SandboxKind) if kind != "off")
CONFIG = ExecutionConfig(
    concurrency=2,
    cgroup="off",
    packages=(),
    interpreters=(InterpreterConfig(name="sh", path=Path("/bin/sh")),),
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    async with open_sandboxes(kind=request.param, config=CONFIG) as opened:
        assert opened is not None
        yield opened.programs


def python(source: str, *arguments: str, stdin: bytes = b"", limits: RunLimits | None = None) -> Program:
    argv = ("python", "main.py", *arguments)
    return Program(argv=argv, files={"main.py": source.encode()}, stdin=stdin, limits=limits or RunLimits(wall_s=60.0))


async def test_a_program_reads_its_input_and_files_and_its_output_comes_back(sandbox: SandboxPool) -> None:
    ended = await sandbox.run(python("import sys; print(sys.stdin.read() + '!'); sys.exit(3)", stdin=b"hello"))
    assert (ended.exit_code, ended.signal, ended.stdout, ended.timed_out) == (3, None, b"hello!\n", False)


async def test_a_program_is_killed_at_its_deadline(sandbox: SandboxPool) -> None:
    ended = await sandbox.run(python("import time; time.sleep(600)", limits=RunLimits(wall_s=2.0)))
    assert (ended.timed_out, ended.signal, ended.exit_code) == (True, 9, None)


async def test_what_a_program_computed_before_it_was_killed_counts(sandbox: SandboxPool) -> None:
    source = (
        "import os, time\nnobody_waits_for_it = os.fork()\nwhile time.process_time() < 0.4: pass\n"
        "os.write(1, b'!\\n')\ntime.sleep(600)"
    )
    deadline = asyncio.get_running_loop().time() + 60
    async with sandbox.open(python(source)) as running:
        for _ in range(2):
            assert await running.readline(deadline=deadline) == b"!\n"
        assert 0.75 < (await running.killed()).cpu_s < 10.0


async def test_output_is_cut_and_the_program_goes_on(sandbox: SandboxPool) -> None:
    ended = await sandbox.run(python("print('x' * 1000000); import sys; sys.stderr.write('y')"))
    assert (len(ended.stdout), ended.stdout_cut, ended.stderr, ended.stderr_cut) == (1 << 16, True, b"y", False)


async def test_a_program_can_be_talked_to(sandbox: SandboxPool) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    async with sandbox.open(python("while True: print(int(input()) + 1, flush=True)")) as running:
        for number in range(3):
            await running.write(b"%d\n" % number, deadline=deadline)
            assert await running.readline(deadline=deadline) == b"%d\n" % (number + 1)
        assert (await running.ended()).exit_code == 1


async def test_a_line_that_is_too_long_comes_in_parts_and_nothing_is_lost(sandbox: SandboxPool) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    program = python("print('x' * 5000); print('end')", limits=RunLimits(wall_s=60.0, output_bytes=2000))
    async with sandbox.open(program) as running:
        parts = []
        while part := await running.readline(deadline=deadline):
            parts.append(part)
    assert b"".join(parts) == b"x" * 5000 + b"\nend\n"
    assert len(parts) > 2


async def test_a_program_that_is_left_is_killed_and_its_place_serves_the_next(sandbox: SandboxPool) -> None:
    for _ in range(2 * sandbox.size):
        async with sandbox.open(python("import time; time.sleep(600)")):
            assert sandbox.busy == 1
    assert sandbox.busy == 0
    assert (await sandbox.run(python("print(1)"))).stdout == b"1\n"


async def test_a_task_that_is_cancelled_leaves_its_place_to_others(sandbox: SandboxPool) -> None:
    for _ in range(2 * sandbox.size):
        started = asyncio.Event()
        running = asyncio.ensure_future(_sleep(sandbox, started))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await sandbox.run(python("print(1)"))).stdout == b"1\n"


async def _sleep(sandbox: SandboxPool, started: asyncio.Event) -> None:
    async with sandbox.open(python("import time; time.sleep(600)")) as running:
        started.set()
        await running.ended()


@pytest.mark.parametrize(
    "argv",
    [
        ("main.py", "a", "b"),
        ("-c", "import sys; print(sys.argv, __name__, sys.path[0]); raise SystemExit('bye')", "x"),
        ("-m", "main", "x"),
        ("-c", "def f(): 1/0\nf()"),
        ("-u", "main.py", "a"),
    ],
)
async def test_python_runs_as_when_it_is_started_for_the_program(sandbox: SandboxPool, argv: tuple[str, ...]) -> None:
    source = b"import sys, sib\nprint(sys.argv[1:], __name__, __file__, sib.x)\nassert False, 'no'\n"
    files = {"main.py": source, "sib.py": b"x = 7"}
    one = await sandbox.run(Program(argv=("python", *argv), files=files))
    # With such a variable, another interpreter is started for it.
    two = await sandbox.run(Program(argv=("python", *argv), files=files, environment={"PYTHONUTF8": "1"}))
    folder = _folder_in(one.stdout), _folder_in(two.stdout)
    assert one.stdout.replace(folder[0], folder[1]) == two.stdout
    assert one.stderr.replace(_folder_in(one.stderr), _folder_in(two.stderr)) == two.stderr
    assert one.exit_code == two.exit_code


def _folder_in(text: bytes) -> bytes:
    """The folder of a run, which differs from run to run where nothing is isolated."""
    start = text.find(b"/tmp/")
    return text[start : text.find(b"/main.py", start)] if start >= 0 else b"/none"


async def test_threads_forks_and_pools_of_processes_work(sandbox: SandboxPool) -> None:
    source = """
import concurrent.futures, multiprocessing, os, threading
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(double, [1, 2]))
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(double, [3]))
    thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
"""
    ended = await sandbox.run(python(source))
    assert (ended.stdout, ended.exit_code) == (b"[2, 4]\n[6]\nthread\n", 0), ended.stderr


async def test_other_interpreters_run_by_their_name(sandbox: SandboxPool) -> None:
    ended = await sandbox.run(
        Program(argv=("sh", "-c", "read x; echo $x $A; exit 4"), stdin=b"in\n", environment={"A": "b"})
    )
    assert (ended.stdout, ended.exit_code) == (b"in b\n", 4)


async def test_a_program_that_there_is_not_ends_like_in_a_shell(sandbox: SandboxPool) -> None:
    ended = await sandbox.run(Program(argv=("no-such-program",)))
    assert (ended.exit_code, ended.stderr) == (127, b"no-such-program: No such file or directory\n")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a/", "a\0b"])
async def test_files_cannot_be_put_elsewhere(sandbox: SandboxPool, name: str) -> None:
    with pytest.raises(UserError, match="relative path"):
        await sandbox.run(Program(argv=("python", "-c", ""), files={name: b""}))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (RunLimits(wall_s=1e6), r"limit wall_s: got 1e\+06, expected more than 0 and at most 120"),
        (RunLimits(memory_mib=100_000), "execution.max_memory_mib"),
        (RunLimits(processes=0), "execution.max_processes"),
    ],
)
async def test_limits_above_the_operators_are_refused(sandbox: SandboxPool, limits: RunLimits, message: str) -> None:
    with pytest.raises(UserError, match=message):
        await sandbox.run(python("", limits=limits))


async def test_more_programs_than_places_take_turns(sandbox: SandboxPool) -> None:
    ended = await asyncio.gather(*(sandbox.run(python(f"print({n})")) for n in range(10)))
    assert [int(each.stdout) for each in ended] == list(range(10))
