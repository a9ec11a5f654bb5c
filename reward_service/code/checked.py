"""Tests that are code (assert, check, pytest): they run in one process and the solution in another.

The two meet only here:

    tests' process --"R nonce .."--> reports: which case begins, and how it ends
                   --"S .."--------> solution's process, whose answer goes back ("G ..": it runs none of its code)

Only one of the two is at work at any time, so one loop reads from whichever it is. What the solution writes goes to the
tests' process alone, as data, and can be no report.
"""

import asyncio
import contextlib
import json
import re
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reward_service.code.arguments import AssertTests, Case, CaseVerdict, CheckTests, PytestTests
from reward_service.code.inside.channel import Message
from reward_service.code.inside.plain import Json
from reward_service.code.solution import (
    START_S,
    Harness,
    Solution,
    SolutionEnded,
    SolutionServer,
    TimeBudget,
    end,
    late,
    open_solution,
    parsed,
)
from reward_service.verifier.program import Running, Sandbox
from reward_service.verifier.submission import DataError, InfrastructureError

_TO_SOLUTION = b"S "
_READ_NAME = b"G "
_MAX_CASES = 10_000
# pytest and what tests compute: their process is the service's choice, not the solution's.
_TESTS_MEMORY_MIB = 1024


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
        """Note a report; whether it is the last one."""
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


def _verdict(passed: Literal[True, False, None] | object, error: str) -> CaseVerdict:
    if passed is None:
        return CaseVerdict.SKIPPED
    if passed is True:
        return CaseVerdict.PASSED
    return CaseVerdict.WRONG if "AssertionError" in error or "DID NOT RAISE" in error else CaseVerdict.ERROR


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The input of the tests' process. `weights` are those of the cases in order, where they are known before it runs.

    `named` are weights by the name of a case or of its function, where they are not.
    """

    module: str
    start: Message
    files: Mapping[str, bytes] = field(default_factory=dict)
    weights: Sequence[float] | None = None
    named: Mapping[str, float] = field(default_factory=dict)


def suite_of(tests: AssertTests | CheckTests | PytestTests, *, prelude: str) -> Suite:
    """The suite of an item's tests, of which `check` finds what the prelude defines before its function.

    Raises DataError for the names of files that cannot be.
    """
    if isinstance(tests, PytestTests):
        files = {f"tests/{_checked(name)}": source.encode(errors="replace") for name, source in tests.files.items()}
        return Suite(module="run_pytest", start={"module": tests.module}, files=files, named=tests.weights)
    entry_points = [tests.entry_point] if isinstance(tests, CheckTests) else tests.entry_points
    start: Message = {
        "kind": tests.kind,
        "setup": tests.setup,
        "head": _head(prelude, tests.entry_point) if isinstance(tests, CheckTests) else "",
        "cases": [case.code for case in tests.cases],
        "entry_points": [*entry_points],
    }
    return Suite(module="run_asserts", start=start, weights=[case.weight for case in tests.cases])


@dataclass(frozen=True, kw_only=True)
class Checker:
    """Runs suites. `pairs` bounds those at once: each waits for a second place in the sandbox while it has one."""

    sandbox: Sandbox
    harness: Harness
    pairs: asyncio.Semaphore

    async def run(self, *, solution: Solution, suite: Suite, budget: TimeBudget) -> Sequence[Case]:
        """A verdict for each case. A case that a process does not survive costs that case; the rest run in new ones.

        Raises DataError where the tests are broken, InfrastructureError.
        """
        verdicts: dict[int, CaseVerdict] = {}
        names: list[str] | None = None
        while True:
            known = [] if names is None else [name for number, name in enumerate(names) if number in verdicts]
            async with self._pair(solution=solution, suite=suite, budget=budget) as (served, tests):
                done = await _round(served, tests, suite=suite, budget=budget, verdicts=verdicts, known=known)
                await end(served.running, budget)
            if done.case is not None:
                done.verdicts[done.case] = done.left or CaseVerdict.ERROR
            names = done.collected if names is None else names
            verdicts |= _renumbered(done, names)
            if done.left is None or done.case is None:
                return _cases(suite, names=names, verdicts=verdicts, rest=done.left)

    @contextlib.asynccontextmanager
    async def _pair(
        self, *, solution: Solution, suite: Suite, budget: TimeBudget
    ) -> AsyncIterator[tuple[SolutionServer, Running]]:
        """Both processes, which start beside each other: neither is waited for here."""
        seconds = budget.left_s
        program = self.harness.program(
            module=suite.module,
            files=suite.files,
            seconds=seconds,
            memory_mib=min(_TESTS_MEMORY_MIB, self.harness.execution.max_memory_mib),
            fresh=solution.fresh,
        )
        async with (
            self.pairs,
            open_solution(sandbox=self.sandbox, solution=solution, harness=self.harness, seconds=seconds) as served,
            self.sandbox.open(program) as tests,
        ):
            yield served, tests


async def _round(
    served: SolutionServer,
    tests: Running,
    *,
    suite: Suite,
    budget: TimeBudget,
    verdicts: Mapping[int, CaseVerdict],
    known: list[str],
) -> CheckedRound:
    """Runs the tests once over the cases without a verdict."""
    try:
        with budget.case() as deadline:
            names: list[Json] = [*await served.names(deadline=deadline)]
    except TimeoutError:
        return CheckedRound(left=CaseVerdict.TIMEOUT)
    except SolutionEnded as error:
        return CheckedRound(left=error.verdict)
    nonce = secrets.token_hex(16)
    first = max(verdicts, default=-1) + 1
    start: Message = {**suite.start, "nonce": nonce, "names": names, "first": first, "known": [*known]}
    await tests.write(json.dumps(start).encode() + b"\n", deadline=budget.deadline)
    done = await Relay(solution=served, tests=tests, nonce=nonce, budget=budget).run()
    await end(tests, budget)
    return done


def _renumbered(done: CheckedRound, names: list[str] | None) -> Mapping[int, CaseVerdict]:
    """The verdicts of a round by the numbers of the first one: a later round may collect in another order."""
    if names is None or done.collected is None:
        return done.verdicts
    first = {name: number for number, name in enumerate(names)}
    found = {
        done.collected[number]: verdict for number, verdict in done.verdicts.items() if number < len(done.collected)
    }
    return {first[name]: verdict for name, verdict in found.items() if name in first}


def _cases(
    suite: Suite, *, names: list[str] | None, verdicts: Mapping[int, CaseVerdict], rest: CaseVerdict | None
) -> Sequence[Case]:
    """All cases with their verdicts; those that were not reached have `rest`.

    Raises DataError if a run that came to its end left out a case.
    """
    weights = suite.weights
    if weights is None:
        if names is None:  # the solution did not let the tests be collected
            return [Case(verdict=rest or CaseVerdict.ERROR)]
        weights = [_weight(name, suite.named) for name in names]
    missing = [number for number in range(len(weights)) if number not in verdicts]
    if missing and rest is None:
        raise DataError(f"the tests ended before {len(missing)} of their {len(weights)} cases were run")
    return [Case(verdict=verdicts.get(number, rest or CaseVerdict.ERROR), weight=w) for number, w in enumerate(weights)]


def _weight(name: str, named: Mapping[str, float]) -> float:
    """By the test's id, the id without parameters, or the function's own name."""
    plain = name.partition("[")[0]
    for key in (name, plain, plain.rpartition("::")[2]):
        if key in named:
            return named[key]
    return 1.0


def _head(prelude: str, entry_point: str) -> str:
    """A prompt's code before the function, or class, that the solution is to write."""
    name = re.escape(entry_point.partition(".")[0].removesuffix("()"))
    return re.split(
        rf"^(?:@.*\n)*(?:(?:async )?def {name}\b|class (?:{name}|Solution)\b)", prelude, maxsplit=1, flags=re.MULTILINE
    )[0]


def _checked(name: str) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise DataError(f"the name of a test file must be a relative path without '..', got {name!r}")
    return name
