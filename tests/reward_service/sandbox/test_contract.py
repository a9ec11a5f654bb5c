"""What every sandbox does with programs that mean no harm."""

import asyncio

import pytest

from reward_service.sandbox.program import Limits, Program, Sandbox
from reward_service.sandbox.unsafe import UnsafeSandbox


@pytest.fixture
def sandbox() -> Sandbox:
    return UnsafeSandbox(concurrency=2)


def python(source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Program:
    return Program(
        argv=("python", "main.py"), files={"main.py": source.encode()}, stdin=stdin, limits=limits or Limits()
    )


async def test_a_program_reads_its_input_and_files_and_its_output_comes_back(sandbox: Sandbox) -> None:
    ended = await sandbox.run(python("import sys; print(sys.stdin.read() + '!'); sys.exit(3)", stdin=b"hello"))
    assert (ended.exit_code, ended.signal, ended.stdout, ended.timed_out) == (3, None, b"hello!\n", False)


async def test_a_program_is_killed_at_its_deadline(sandbox: Sandbox) -> None:
    ended = await sandbox.run(python("import time; time.sleep(600)", limits=Limits(wall_s=0.5)))
    assert (ended.timed_out, ended.signal, ended.exit_code) == (True, 9, None)


async def test_output_is_cut_and_the_program_goes_on(sandbox: Sandbox) -> None:
    ended = await sandbox.run(python("print('x' * 1000000); import sys; sys.stderr.write('y')"))
    assert (len(ended.stdout), ended.stdout_cut, ended.stderr, ended.stderr_cut) == (1 << 16, True, b"y", False)


async def test_a_program_can_be_talked_to(sandbox: Sandbox) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    async with sandbox.open(python("while True: print(int(input()) + 1, flush=True)")) as running:
        for number in range(3):
            await running.write(b"%d\n" % number, deadline=deadline)
            assert await running.readline(deadline=deadline) == b"%d\n" % (number + 1)
        assert (await running.ended()).exit_code == 1
