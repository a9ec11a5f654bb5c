"""Programs that read standard input and write standard output: a process for each case, and the comparison here."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from reward_service.code.arguments import StdioCase, StdioTests
from reward_service.code.budget import Budget
from reward_service.code.comparison import LARGE_BYTES, outputs_equal
from reward_service.code.solution import Solution
from reward_service.code.verdict import Case, Verdict
from reward_service.sandbox.program import Ended, Sandbox
from reward_service.verifier import DataError, VerifierError

# A right output may have more spaces than the expected one, but not without bound.
_SPARE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the operator gives: cases of one item beside each other, and bytes of output of one program."""

    parallel: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Limits:
    output_bytes: int
    budget: Budget


async def run_stdio(
    *, sandbox: Sandbox, solution: Solution, tests: StdioTests, budget: Budget, room: Room
) -> Sequence[Case]:
    """A verdict for each case, some of them beside each other. Raises what the sandbox raises, DataError."""
    places = asyncio.Semaphore(room.parallel)

    async def judged(case: StdioCase) -> Case:
        async with places:
            limits = _Limits(output_bytes=_output_bytes(case, room), budget=budget)
            verdict = await _run_case(sandbox=sandbox, solution=solution, tests=tests, case=case, limits=limits)
        return Case(verdict=verdict, weight=case.weight)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(judged(case)) for case in tests.cases]
    except* VerifierError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


async def _run_case(
    *, sandbox: Sandbox, solution: Solution, tests: StdioTests, case: StdioCase, limits: _Limits
) -> Verdict:
    seconds = limits.budget.next_s()
    if seconds == 0:
        return Verdict.TIMEOUT
    program = solution.program(
        stdin=case.stdin.encode(errors="replace"),
        wall_s=seconds,
        output_bytes=limits.output_bytes,
    )
    ended = await sandbox.run(program)
    limits.budget.charge(ended.wall_s)
    if len(ended.stdout) < LARGE_BYTES:
        return _verdict(ended, tests=tests, case=case)
    return await asyncio.to_thread(_verdict, ended, tests=tests, case=case)


def _verdict(ended: Ended, *, tests: StdioTests, case: StdioCase) -> Verdict:
    if ended.timed_out or ended.signal == signal.SIGXCPU:
        return Verdict.TIMEOUT
    if ended.exit_code != 0:
        return Verdict.ERROR
    output = ended.stdout.decode(errors="replace").replace("\r\n", "\n")
    right = outputs_equal(output, case.stdout, compare=tests.compare, tolerance=tests.tolerance)
    return Verdict.PASSED if right and not ended.stdout_cut else Verdict.WRONG


def _output_bytes(case: StdioCase, room: Room) -> int:
    """What is kept of a program's output: enough for the right one. Raises DataError if that is beyond the service."""
    right = len(case.stdout.encode(errors="replace"))
    if right > room.output_bytes:
        raise DataError(
            f"a case's stdout has {right} bytes, and this service keeps {room.output_bytes} of a program's output "
            "(execution.max_output_bytes)"
        )
    return min(2 * right + _SPARE_BYTES, room.output_bytes)
