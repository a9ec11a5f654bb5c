"""Function calls: one process of the solution answers all of them, and what it returns is compared here."""

import ast
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from reward_service.code.arguments import CallCase, CallTests
from reward_service.code.budget import Budget
from reward_service.code.comparison import LARGE_BYTES, values_equal
from reward_service.code.harness.exchange import Message
from reward_service.code.harness.plain import Encoder, Json, NotPlain
from reward_service.code.processes import Harness
from reward_service.code.served import Served, SolutionEnded, open_solution, parsed
from reward_service.code.solution import Solution
from reward_service.code.verdict import Case, Verdict
from reward_service.sandbox.program import Sandbox
from reward_service.verifier import DataError

_MAX_LITERAL_CHARS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Call:
    request: bytes
    expected: Json


async def run_calls(
    *, sandbox: Sandbox, solution: Solution, tests: CallTests, budget: Budget, harness: Harness
) -> Sequence[Case]:
    """A verdict for each case. A process that dies or hangs costs its case; the rest are run in a new one.

    Raises DataError for literals that cannot be read, InfrastructureError.
    """
    calls = [_call(case, tests=tests) for case in tests.cases]
    verdicts: list[Verdict] = []
    while len(verdicts) < len(calls):
        seconds = budget.next_s()
        if seconds == 0:
            verdicts += [Verdict.TIMEOUT] * (len(calls) - len(verdicts))
            break
        opened = open_solution(sandbox=sandbox, solution=solution, harness=harness, seconds=budget.left_s)
        async with opened as served:
            verdicts += await _round(served, calls=calls[len(verdicts) :], tests=tests, budget=budget)
    return [Case(verdict=verdict, weight=case.weight) for verdict, case in zip(verdicts, tests.cases, strict=True)]


async def _round(served: Served, *, calls: Sequence[_Call], tests: CallTests, budget: Budget) -> Sequence[Verdict]:
    """The verdicts up to the first case that the process does not survive. One that does not load fails all cases."""
    verdicts: list[Verdict] = []
    try:
        with budget.case() as deadline:
            await served.names(deadline=deadline)
    except TimeoutError:
        return [Verdict.TIMEOUT] * len(calls)
    except SolutionEnded:
        return [Verdict.ERROR] * len(calls)
    for call in calls:
        if budget.next_s() == 0:
            break
        try:
            with budget.case() as deadline:
                await served.send(call.request, deadline=deadline)
                line = await served.line(deadline=deadline)
            verdicts.append(await _verdict(line, call=call, tests=tests))
        except TimeoutError:
            return [*verdicts, Verdict.TIMEOUT]
        except SolutionEnded:
            return [*verdicts, Verdict.ERROR]
    return verdicts


async def _verdict(line: bytes, *, call: _Call, tests: CallTests) -> Verdict:
    """Raises SolutionEnded for a line that is no answer."""
    if len(line) < LARGE_BYTES:
        return _judged(line, call=call, tests=tests)
    return await asyncio.to_thread(_judged, line, call=call, tests=tests)


def _judged(line: bytes, *, call: _Call, tests: CallTests) -> Verdict:
    answer = parsed(line).get("answer")
    if not isinstance(answer, dict) or "value" not in answer:
        return Verdict.ERROR
    equal = values_equal(
        answer["value"], call.expected, tuples_are_lists=tests.tuples_are_lists, tolerance=tests.tolerance
    )
    return Verdict.PASSED if equal else Verdict.WRONG


def _call(case: CallCase, *, tests: CallTests) -> _Call:
    arguments: list[object] = [_value(part, tests=tests) for part in case.arguments]
    keywords = {name: _value(part, tests=tests) for name, part in case.keywords.items()}
    ask: Message = {
        "do": "entry",
        "entry_point": tests.entry_point,
        "args": _encoded(arguments),
        "keywords": _encoded(keywords),
    }
    request = json.dumps({"ask": ask}).encode() + b"\n"
    return _Call(request=request, expected=_encoded(_value(case.expected, tests=tests)))


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
        return ast.literal_eval(given.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise DataError(f"not a Python literal: {given[:100]!r}") from error


def _encoded(value: object) -> Json:
    try:
        return Encoder(_refuse).encode(value)
    except (NotPlain, RecursionError) as error:
        raise DataError(f"a value of the tests cannot be sent: {error}") from error


def _refuse(value: object) -> Json:
    raise NotPlain(f"{type(value).__name__} is no plain value")
