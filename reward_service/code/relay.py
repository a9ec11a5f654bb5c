"""The exchange between the process of the tests and that of the solution, which meet only here:

    tests' process --"R nonce .."--> reports: which case begins, and how it ends
                   --"S .."--------> solution's process, whose answer goes back ("G ..": it runs none of its code)

Only one of the two is at work at any time, so one loop reads from whichever it is. What the solution writes goes to the
tests' process alone, as data, and can be no report.
"""

import asyncio
import signal
from dataclasses import dataclass, field

from reward_service.code.arguments import CaseVerdict
from reward_service.code.inside.channel import Message
from reward_service.code.solution import START_S, SolutionEnded, SolutionServer, TimeBudget, late, parsed
from reward_service.verifier.program import Running
from reward_service.verifier.submission import DataError, InfrastructureError

_TO_SOLUTION = b"S "
_READ_NAME = b"G "
_MAX_CASES = 10_000


class TestsEnded(Exception):
    """The tests' process has ended, or has broken the exchange."""


@dataclass(kw_only=True)
class CheckedRound:
    """Results of one run of the tests. `left`: how it ended before all cases had; None if it ran to its end."""

    verdicts: dict[int, CaseVerdict] = field(default_factory=dict)
    collected: list[str] | None = None
    case: int | None = None
    left: CaseVerdict | None = None


class Relay:
    """A run of the tests on one process of the solution."""

    def __init__(self, *, solution: SolutionServer, tests: Running, nonce: str, budget: TimeBudget) -> None:
        self._solution = solution
        self._tests = tests
        self._report_prefix = f"R {nonce} ".encode()
        self._budget = budget
        self._round = CheckedRound()
        self._touched = False
        # When the solution began to be charged: with a case, or with the first request outside of one.
        self._charged_from: float | None = None

    async def run(self) -> CheckedRound:
        """Relay until the tests are done, or a case has outlived its time or a process.

        Raises DataError where the tests themselves are broken, InfrastructureError.
        """
        try:
            await self._relay()
        except TimeoutError:
            self._round.left = await self._timed_out()
        except SolutionEnded as error:
            self._round.left = error.verdict
        except TestsEnded as error:
            self._round.left = await self._tests_ended(error)
        finally:
            self._stop_charging()
        return self._round

    async def _relay(self) -> None:
        while True:
            line = await self._tests.readline(deadline=self._deadline())
            if not line.endswith(b"\n"):
                raise TestsEnded("the process of the tests ended")
            kind, request = line[:2], line[2:]
            if kind in (_TO_SOLUTION, _READ_NAME):
                self._touched = self._touched or kind == _TO_SOLUTION
                await self._forward(request)
            elif not line.startswith(self._report_prefix):
                raise TestsEnded("the process of the tests wrote what is no report")
            elif self._take(_report(line[len(self._report_prefix) :])):
                return

    async def _forward(self, request: bytes) -> None:
        self._start_charging()
        deadline = self._deadline()
        await self._solution.send(request, deadline=deadline)
        answer = await self._solution.line(deadline=deadline)
        await self._tests.write(answer, deadline=deadline)

    def _take(self, report: Message) -> bool:
        """Notes a report. Returns True after the last one."""
        match report:
            case {"begin": int(case)}:
                self._stop_charging()
                if self._budget.next_s() == 0:
                    self._round.left = CaseVerdict.TIMEOUT
                    return True
                self._round.case, self._touched = case, False
                self._start_charging()
            case {"end": int(case), "passed": passed, "error": str(error)}:
                self._round.verdicts[case] = _verdict(passed, error)
                self._round.case = None
                self._stop_charging()
            case {"collected": list(names)}:
                self._round.collected = [str(name) for name in names][:_MAX_CASES]
            case {"broken": str(error), "touched": bool(touched)}:
                if not touched:
                    raise DataError(f"the tests cannot run: {error}")
                self._round.left = CaseVerdict.ERROR
                return True
            case {"done": True}:
                return True
            case _:
                raise TestsEnded("the process of the tests wrote a report of no known form")
        return False

    def _deadline(self) -> float:
        """Time by which the side that is at work must have written."""
        clock = asyncio.get_running_loop().time()
        if self._charged_from is None:
            return min(clock + START_S, self._budget.deadline)
        return min(self._charged_from + self._budget.next_s(), self._budget.deadline)

    def _start_charging(self) -> None:
        if self._charged_from is None:
            self._charged_from = asyncio.get_running_loop().time()

    def _stop_charging(self) -> None:
        if self._charged_from is not None:
            self._budget.charge(asyncio.get_running_loop().time() - self._charged_from)
            self._charged_from = None

    async def _timed_out(self) -> CaseVerdict:
        now = asyncio.get_running_loop().time()
        if now >= self._budget.deadline:
            raise late()
        if self._charged_from is None:
            raise InfrastructureError(f"the process of the tests was not ready within {START_S:g} s")
        if not self._touched:
            self._stop_charging()
            self._budget.computed((await self._tests.killed()).cpu_s)
            if self._budget.was_idle:
                raise InfrastructureError("the tests did not get to use the solution within timeout_s")
            raise DataError("the tests took longer than timeout_s before they used the solution at all")
        return CaseVerdict.TIMEOUT

    async def _tests_ended(self, error: TestsEnded) -> CaseVerdict:
        """The tests' process has died. After it used the solution, that is the solution's doing: a huge result, say."""
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + START_S, self._budget.deadline)):
                ended = await self._tests.ended()
        except TimeoutError:
            raise InfrastructureError("the process of the tests closed its output and did not end") from None
        if ended.timed_out:
            raise InfrastructureError("the process of the tests was held up for longer than its cases may take")
        if self._touched:
            return CaseVerdict.KILLED if ended.signal == signal.SIGKILL else CaseVerdict.ERROR
        if ended.signal == signal.SIGKILL:
            raise InfrastructureError("the process of the tests was killed before it used the solution")
        text = ended.stderr.decode(errors="replace")[-500:].strip()
        if "No module named 'pytest'" in text:
            raise InfrastructureError("the sandbox's Python has no pytest; install it there")
        raise DataError(f"{error} before it used the solution: {text or ended.exit_code or ended.signal}")


def _report(line: bytes) -> Message:
    try:
        return parsed(line)
    except SolutionEnded as error:
        raise TestsEnded("the process of the tests wrote a report that is not JSON") from error


def _verdict(passed: object, error: str) -> CaseVerdict:
    if passed is None:
        return CaseVerdict.SKIPPED
    if passed is True:
        return CaseVerdict.PASSED
    return CaseVerdict.WRONG if "AssertionError" in error or "DID NOT RAISE" in error else CaseVerdict.ERROR
