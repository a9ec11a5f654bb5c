"""Tests that are code (assert, check, pytest): they run in one process and the solution in another.

A case that one of the two does not survive costs that case; the rest run in new processes.
"""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from reward_service.code.arguments import AssertTests, Case, CaseVerdict, CheckTests, PytestTests
from reward_service.code.inside.channel import Message
from reward_service.code.inside.plain import Json
from reward_service.code.relay import CheckedRound, Relay
from reward_service.code.solution import (
    Harness,
    Solution,
    SolutionEnded,
    SolutionServer,
    TimeBudget,
    end,
    open_solution,
)
from reward_service.verifier.program import Running, Sandbox
from reward_service.verifier.submission import DataError

# pytest and what tests compute: their process is the service's choice, not the solution's.
_TESTS_MEMORY_MIB = 1024


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
