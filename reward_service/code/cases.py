"""Runs cases of calls (one process answers all) and of standard input (a process each), and compares the outputs."""

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from reward_service.code.arguments import CallCase, CallTests, Case, CaseVerdict, StdioCase, StdioTests
from reward_service.code.comparison import LARGE_BYTES, outputs_equal, values_equal
from reward_service.code.inside.channel import Message
from reward_service.code.inside.plain import Json, NotPlain, PlainEncoder
from reward_service.code.solution import (
    Harness,
    Solution,
    SolutionEnded,
    SolutionServer,
    TimeBudget,
    end,
    open_solution,
    parsed,
)
from reward_service.verifier.program import RunEnd, Sandbox
from reward_service.verifier.submission import DataError, VerifierError
from services.python_syntax import literal_of

_MAX_LITERAL_CHARS = 1 << 20
# Of the line in which a value comes.
_AROUND_BYTES = 64
# A right output may have more spaces than the expected one, but not without bound.
_SPARE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class _Call:
    request: bytes
    expected: Json


async def run_calls(
    *, sandbox: Sandbox, solution: Solution, tests: CallTests, budget: TimeBudget, harness: Harness
) -> Sequence[Case]:
    """A verdict for each case. A process that dies or hangs costs its case; the rest are run in a new one.

    Raises DataError for literals that cannot be read, InfrastructureError.
    """
    calls = [_call(case, tests=tests, most=harness.execution.max_output_bytes) for case in tests.cases]
    verdicts: list[CaseVerdict] = []
    while len(verdicts) < len(calls):
        seconds = budget.next_s()
        if seconds == 0:
            verdicts += [CaseVerdict.TIMEOUT] * (len(calls) - len(verdicts))
            break
        opened = open_solution(sandbox=sandbox, solution=solution, harness=harness, seconds=budget.left_s)
        async with opened as served:
            verdicts += await _round(served, calls=calls[len(verdicts) :], tests=tests, budget=budget)
            await end(served.running, budget)
    return [Case(verdict=verdict, weight=case.weight) for verdict, case in zip(verdicts, tests.cases, strict=True)]


async def _round(
    served: SolutionServer, *, calls: Sequence[_Call], tests: CallTests, budget: TimeBudget
) -> Sequence[CaseVerdict]:
    """The verdicts up to the first case that the process does not survive. One that does not load fails all cases."""
    verdicts: list[CaseVerdict] = []
    try:
        with budget.case() as deadline:
            await served.names(deadline=deadline)
    except TimeoutError:
        return [CaseVerdict.TIMEOUT] * len(calls)
    except SolutionEnded as error:
        return [error.verdict] * len(calls)
    for call in calls:
        if budget.next_s() == 0:
            break
        try:
            with budget.case() as deadline:
                await served.send(call.request, deadline=deadline)
                line = await served.line(deadline=deadline)
            verdicts.append(await _verdict(line, call=call, tests=tests))
        except TimeoutError:
            return [*verdicts, CaseVerdict.TIMEOUT]
        except SolutionEnded as error:
            return [*verdicts, error.verdict]
    return verdicts


async def _verdict(line: bytes, *, call: _Call, tests: CallTests) -> CaseVerdict:
    """Raises SolutionEnded for a line that is no answer."""
    if len(line) < LARGE_BYTES:
        return _judged(line, call=call, tests=tests)
    return await asyncio.to_thread(_judged, line, call=call, tests=tests)


def _judged(line: bytes, *, call: _Call, tests: CallTests) -> CaseVerdict:
    answer = parsed(line).get("answer")
    if not isinstance(answer, dict) or "value" not in answer:
        return CaseVerdict.ERROR
    equal = values_equal(
        answer["value"], call.expected, tuples_are_lists=tests.tuples_are_lists, tolerance=tests.tolerance
    )
    return CaseVerdict.PASSED if equal else CaseVerdict.WRONG


def _call(case: CallCase, *, tests: CallTests, most: int) -> _Call:
    arguments: list[object] = [_value(part, tests=tests) for part in case.arguments]
    keywords = {name: _value(part, tests=tests) for name, part in case.keywords.items()}
    ask: Message = {
        "do": "entry",
        "entry_point": tests.entry_point,
        "args": _encoded(arguments),
        "keywords": _encoded(keywords),
    }
    request = json.dumps({"ask": ask}).encode() + b"\n"
    expected = _encoded(_value(case.expected, tests=tests))
    if (size := len(json.dumps(expected)) + _AROUND_BYTES) > most:
        raise DataError(
            f"a case's expected value takes {size} bytes, and this service takes {most} from a program at once "
            "(execution.max_output_bytes)"
        )
    return _Call(request=request, expected=expected)


def _value(given: JsonValue, *, tests: CallTests) -> object:
    if tests.literals == "json":
        return given
    if not isinstance(given, str):
        raise DataError(
            f"with literals = 'python' a value is a string that holds a literal, got {type(given).__name__}"
        )
    if len(given) > _MAX_LITERAL_CHARS:
        raise DataError(f"a literal of {len(given)} characters: at most {_MAX_LITERAL_CHARS} are taken")
    try:
        return literal_of(given.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise DataError(f"not a Python literal: {given[:100]!r}") from error


def _encoded(value: object) -> Json:
    try:
        return PlainEncoder(_refuse).encode(value)
    except (NotPlain, RecursionError) as error:
        raise DataError(f"a value of the tests cannot be sent: {error}") from error


def _refuse(value: object) -> Json:
    raise NotPlain(f"{type(value).__name__} is no plain value")


@dataclass(frozen=True, kw_only=True)
class CaseRoom:
    """The operator's limits: cases of one item beside each other, and bytes of output of one program."""

    parallel: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Limits:
    output_bytes: int
    seconds: float


async def run_stdio(
    *, sandbox: Sandbox, solution: Solution, tests: StdioTests, budget: TimeBudget, room: CaseRoom
) -> Sequence[Case]:
    """A verdict for each case, some of them beside each other. Raises what the sandbox raises, DataError."""
    places = asyncio.Semaphore(room.parallel)

    async def judged(case: StdioCase) -> Case:
        async with places, budget.share() as seconds:
            limits = _Limits(output_bytes=_output_bytes(case, room), seconds=seconds)
            verdict = await _run_case(
                sandbox=sandbox, solution=solution, tests=tests, case=case, limits=limits, budget=budget
            )
        return Case(verdict=verdict, weight=case.weight)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(judged(case)) for case in tests.cases]
    except ExceptionGroup as failed:  # no `except*`: before Python 3.11.4 what it raises is put into a group again
        known, others = failed.split(VerifierError)
        if known is None or others is not None:
            raise
        raise known.exceptions[0] from None
    return [task.result() for task in running]


async def _run_case(
    *, sandbox: Sandbox, solution: Solution, tests: StdioTests, case: StdioCase, limits: _Limits, budget: TimeBudget
) -> CaseVerdict:
    if limits.seconds == 0:
        return CaseVerdict.TIMEOUT
    program = solution.program(
        stdin=case.stdin.encode(errors="replace"),
        wall_s=limits.seconds,
        output_bytes=limits.output_bytes,
    )
    ended = await sandbox.run(program)
    budget.charge(ended.wall_s)
    budget.computed(ended.cpu_s)
    if len(ended.stdout) < LARGE_BYTES:
        return _case_verdict(ended, tests=tests, case=case)
    return await asyncio.to_thread(_case_verdict, ended, tests=tests, case=case)


def _case_verdict(ended: RunEnd, *, tests: StdioTests, case: StdioCase) -> CaseVerdict:
    if ended.timed_out or ended.signal == signal.SIGXCPU:
        return CaseVerdict.TIMEOUT
    if ended.signal == signal.SIGKILL:
        return CaseVerdict.KILLED
    if ended.exit_code != 0:
        return CaseVerdict.ERROR
    # The ends of lines count as one and the same, on both sides: some data sets were made elsewhere.
    output, expected = (text.replace("\r\n", "\n") for text in (ended.stdout.decode(errors="replace"), case.stdout))
    right = outputs_equal(output, expected, compare=tests.compare, tolerance=tests.tolerance)
    return CaseVerdict.PASSED if right and not ended.stdout_cut else CaseVerdict.WRONG


def _output_bytes(case: StdioCase, room: CaseRoom) -> int:
    """Bytes of a program's output that are kept: enough for the right one. Raises DataError if that is beyond the
    service.
    """
    right = len(case.stdout.encode(errors="replace"))
    if right > room.output_bytes:
        raise DataError(
            f"a case's stdout has {right} bytes, and this service keeps {room.output_bytes} of a program's output "
            "(execution.max_output_bytes)"
        )
    return min(2 * right + _SPARE_BYTES, room.output_bytes)
