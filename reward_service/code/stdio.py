"""Programs that read standard input and write standard output: a process for each case, and the comparison here."""

import asyncio
import signal
from collections.abc import Sequence

from reward_service.code.arguments import StdioCase, StdioTests
from reward_service.code.budget import Budget
from reward_service.code.comparison import outputs_equal
from reward_service.code.solution import Solution
from reward_service.code.verdict import Case, Verdict
from reward_service.sandbox.program import Ended, Sandbox
from reward_service.verifier import VerifierError

# A right output may have more spaces than the expected one, but not without bound.
_SPARE_BYTES = 1 << 16


async def run_stdio(
    *, sandbox: Sandbox, solution: Solution, tests: StdioTests, budget: Budget, parallel: int
) -> Sequence[Case]:
    """A verdict for each case, at most `parallel` of them at a time. Raises what the sandbox raises."""
    places = asyncio.Semaphore(parallel)

    async def judged(case: StdioCase) -> Case:
        async with places:
            verdict = await _run_case(sandbox=sandbox, solution=solution, tests=tests, case=case, budget=budget)
        return Case(verdict=verdict, weight=case.weight)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(judged(case)) for case in tests.cases]
    except* VerifierError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


async def _run_case(
    *, sandbox: Sandbox, solution: Solution, tests: StdioTests, case: StdioCase, budget: Budget
) -> Verdict:
    seconds = budget.next_s()
    if seconds == 0:
        return Verdict.TIMEOUT
    program = solution.program(
        stdin=case.stdin.encode(errors="replace"),
        wall_s=seconds,
        output_bytes=2 * len(case.stdout.encode(errors="replace")) + _SPARE_BYTES,
    )
    ended = await sandbox.run(program)
    budget.charge(ended.wall_s)
    return _verdict(ended, tests=tests, case=case)


def _verdict(ended: Ended, *, tests: StdioTests, case: StdioCase) -> Verdict:
    if ended.timed_out or ended.signal == signal.SIGXCPU:
        return Verdict.TIMEOUT
    if ended.exit_code != 0:
        return Verdict.ERROR
    output = ended.stdout.decode(errors="replace").replace("\r\n", "\n")
    right = outputs_equal(output, case.stdout, compare=tests.compare, tolerance=tests.tolerance)
    return Verdict.PASSED if right and not ended.stdout_cut else Verdict.WRONG
