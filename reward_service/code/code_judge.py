"""The verifier `code`: a completion's program, judged by tests that it can neither read nor answer for.

At first, where the code stands in a completion.
"""

import asyncio
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

from protocol.rewards import ScoreItem
from reward_service.code.arguments import (
    NOTHING_EXTRACTED,
    CallTests,
    Case,
    CaseVerdict,
    CodeArguments,
    PytestTests,
    StdioTests,
    score_of,
)
from reward_service.code.cases import CaseRoom, run_calls, run_stdio
from reward_service.code.checked import Checker, suite_of
from reward_service.code.solution import Solution, TimeBudget, late, load_harness, solution_of
from reward_service.verifier.lanes import Lane, Surroundings
from reward_service.verifier.program import ExecutionConfig, NeverBegan, Sandbox
from reward_service.verifier.submission import DataError, Outcome, Score, UserError, error_of, validate_arguments
from services.lines import lines_of
from services.thinking import without_thought

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"^[ \t]{0,12}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`\n]*$")
_NAMES: Mapping[str, frozenset[str]] = {
    "python": frozenset({"python", "py", "python3", "py3"}),
    "javascript": frozenset({"javascript", "js", "node", "nodejs"}),
    "node": frozenset({"javascript", "js", "node", "nodejs"}),
    "bash": frozenset({"bash", "sh", "shell"}),
    "sh": frozenset({"bash", "sh", "shell"}),
}
_PYTHON_LINE = re.compile(
    r"^(?:def |class |async def |import \w|from [\w.]+ import |@\w|if __name__|print\(|for .+:|while .+:|with .+:|"
    r"[^\W\d]\w*(?:, ?\w+)*\s*(?::[^=]+)?=[^=])",
    re.MULTILINE,
)
# Suites whose reference solution is known to pass.
_REMEMBERED_SUITES = 4096
# More would let one item of many cases take the sandbox from all others.
_PARALLEL_CASES = 4


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: the first word after the fence in lower case, and the lines within."""

    label: str
    code: str


def extract_code(completion: str, *, language: str, which: Literal["last", "first", "whole"]) -> str | None:
    """The solution's code, or None if the completion holds none.

    A block without a label counts where no block has the language's. A block that is not closed ends with the text.
    """
    text = without_thought(completion)  # leading spaces are code, and stay
    if which == "whole":
        return text if text.strip() else None
    blocks = list(fenced_blocks(text))
    names = _NAMES.get(language, frozenset({language}))
    chosen = [block for block in blocks if block.label in names] or [block for block in blocks if not block.label]
    chosen = [block for block in chosen if block.code.strip()]
    if chosen:
        return chosen[-1 if which == "last" else 0].code
    return text if not blocks and _looks_like_code(text, language=language) else None


def fenced_blocks(text: str) -> Iterator[Block]:
    """All fenced blocks, in order. The closing fence has at least the opening one's length, and nothing after it."""
    opening, label, indent = "", "", 0
    lines: list[str] = []
    for line in lines_of(text):
        match = _FENCE.match(line)
        if not opening and match:
            opening, label, lines = match[1], match[2].lower().strip("{}."), []
            indent = len(line) - len(line.lstrip())
        elif opening and match and match[1].startswith(opening) and line.strip() == match[1]:
            yield Block(label=label, code="\n".join(lines) + "\n")
            opening = ""
        elif opening:
            lines.append(_outdented(line, indent))
    if opening:
        yield Block(label=label, code="\n".join(lines) + "\n")


def _outdented(line: str, indent: int) -> str:
    """The line of a block in a list item, without as much space as its fence has before it."""
    return line[min(indent, len(line) - len(line.lstrip())) :]


def _looks_like_code(text: str, *, language: str) -> bool:
    """True if a text without fences is a program. What the interpreter makes of it is seen when it runs."""
    if language != "python":
        return bool(text.strip())
    return _PYTHON_LINE.search(text) is not None


class CodeJudge:
    """Judges code in a sandbox that has been opened with the given configuration."""

    def __init__(self, *, sandbox: Sandbox, execution: ExecutionConfig) -> None:
        self._sandbox = sandbox
        self._execution = execution
        places = execution.concurrency
        self._room = CaseRoom(parallel=min(_PARALLEL_CASES, places), output_bytes=execution.max_output_bytes)
        self._harness = load_harness(execution)
        # One place less: of those that hold a place and wait for a second one, one at least can go on.
        self._pairs = places - 1
        self._checker = Checker(sandbox=sandbox, harness=self._harness, pairs=asyncio.Semaphore(self._pairs))
        self._sound: OrderedDict[bytes, None] = OrderedDict()

    async def score(self, completion: str, arguments: CodeArguments, *, deadline: float) -> Score:
        """The score of a completion. Raises UserError, DataError for broken tests, InfrastructureError."""
        _check(arguments, self._execution)
        code = extract_code(completion, language=arguments.language, which=arguments.extract)
        if code is None:
            return NOTHING_EXTRACTED
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await self._check_reference(arguments, deadline=deadline)
                solution = solution_of(code, arguments=arguments, execution=self._execution)
                cases = await self._run(solution, arguments, deadline=deadline)
        except TimeoutError:
            raise late() from None
        return score_of(cases, reward=arguments.reward)

    async def _run(self, solution: Solution, arguments: CodeArguments, *, deadline: float) -> Sequence[Case]:
        """A verdict for each case. One that may be our fault is believed when another sandbox confirms it."""

        def budget() -> TimeBudget:
            return TimeBudget(case_s=arguments.timeout_s, total_s=arguments.total_timeout_s, deadline=deadline)

        first, afresh = budget(), replace(solution, fresh=True)
        try:
            cases = await self._attempt(solution, arguments, first)
        except NeverBegan as error:
            logger.warning("%s; run once more elsewhere", error)
            return await self._attempt(afresh, arguments, budget())
        doubtful = {CaseVerdict.KILLED, CaseVerdict.TIMEOUT} if first.was_idle else {CaseVerdict.KILLED}
        found = next((number for number, case in enumerate(cases) if case.verdict in doubtful), None)
        if found is None:
            return cases
        found_as = cases[found].verdict
        logger.info("a case ended as %s, which may not be the program's doing: run once more elsewhere", found_as.value)
        if not isinstance(arguments.tests, PytestTests):
            (confirmed,) = await self._attempt(afresh, _alone(arguments, found), budget())
            if confirmed.verdict is found_as:
                return cases
        again = await self._attempt(afresh, arguments, budget())
        return _without(doubtful, cases, again)

    async def _attempt(self, solution: Solution, arguments: CodeArguments, budget: TimeBudget) -> Sequence[Case]:
        tests = arguments.tests
        if isinstance(tests, StdioTests):
            return await run_stdio(
                sandbox=self._sandbox, solution=solution, tests=tests, budget=budget, room=self._room
            )
        if isinstance(tests, CallTests):
            return await run_calls(
                sandbox=self._sandbox, solution=solution, tests=tests, budget=budget, harness=self._harness
            )
        if not self._pairs:
            raise UserError(f"tests of kind {tests.kind!r} need two programs at once: set execution.concurrency to 2")
        return await self._checker.run(
            solution=solution, suite=suite_of(tests, prelude=arguments.prelude), budget=budget
        )

    async def _check_reference(self, arguments: CodeArguments, *, deadline: float) -> None:
        """Raises DataError if the reference solution does not pass every case."""
        if arguments.reference is None:
            return
        key = hashlib.sha256(arguments.model_dump_json().encode(errors="replace")).digest()
        if key in self._sound:
            self._sound.move_to_end(key)
            return
        reference = solution_of(arguments.reference, arguments=arguments, execution=self._execution)
        cases = await self._run(reference, arguments, deadline=deadline)
        score = score_of(cases, reward="all")
        if score.reward != 1.0:
            passed, counted = (int(score.components[name]) for name in ("passed", "cases"))
            raise DataError(f"the tests are broken: their reference solution passes {passed} of {counted} cases")
        self._sound[key] = None
        if len(self._sound) > _REMEMBERED_SUITES:
            self._sound.popitem(last=False)


def _alone(arguments: CodeArguments, number: int) -> CodeArguments:
    """With one of the cases."""
    assert not isinstance(arguments.tests, PytestTests)
    tests = arguments.tests.model_copy(update={"cases": (arguments.tests.cases[number],)})
    return arguments.model_copy(update={"tests": tests})


def _without(doubtful: Set[CaseVerdict], cases: Sequence[Case], again: Sequence[Case]) -> Sequence[Case]:
    """The first verdicts, with a second one for each that is doubtful."""
    if len(cases) != len(again):  # tests that were not collected the first time
        return again
    return [new if old.verdict in doubtful else old for old, new in zip(cases, again, strict=True)]


class CodeLane(Lane):
    """Items are judged on the event loop, whose processes do the work; the sandbox bounds how many there are."""

    def __init__(self, judge: CodeJudge | None) -> None:
        self._judge = judge

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome, at the deadline at the latest."""
        try:
            arguments = validate_arguments(model=CodeArguments, arguments=item.arguments)
            assert isinstance(arguments, CodeArguments)
            if self._judge is None:
                raise UserError(
                    "the verifier code runs programs, and this service has no sandbox; set sandbox = 'required' in "
                    "[reward-service] on a machine with bubblewrap, or 'unsafe' to run them without isolation"
                )
        except UserError as error:
            return Outcome(result=error_of(error))
        return _outcome(self._judge, item, arguments, deadline=deadline)


async def _outcome(judge: CodeJudge, item: ScoreItem, arguments: CodeArguments, *, deadline: float) -> Outcome:
    try:
        return Outcome(result=await judge.score(item.completion, arguments, deadline=deadline))
    except Exception as error:  # noqa: BLE001  whatever fails becomes an error of this item alone
        return Outcome(result=error_of(error))


@asynccontextmanager
async def open_code(surroundings: Surroundings) -> AsyncIterator[Lane]:
    """The lane of `code`. Without a sandbox, its items get a UserError."""
    sandbox = surroundings.sandbox
    yield CodeLane(None if sandbox is None else CodeJudge(sandbox=sandbox, execution=surroundings.config.execution))


def _check(arguments: CodeArguments, execution: ExecutionConfig) -> None:
    """Raises UserError for what does not go together, DataError for tests without a case."""
    tests = arguments.tests
    if arguments.language != "python" and not isinstance(tests, StdioTests):
        raise UserError(f"tests of kind {tests.kind!r} are for python; {arguments.language} can be tested with stdio")
    if not isinstance(tests, PytestTests) and not tests.cases:
        raise DataError(f"the tests of kind {tests.kind!r} hold no case; give at least one")
    seconds = arguments.timeout_s if isinstance(tests, StdioTests) else arguments.total_timeout_s
    if seconds > execution.max_wall_s:
        name = "timeout_s" if isinstance(tests, StdioTests) else "total_timeout_s"
        raise UserError(f"{name}: got {seconds:g}, expected at most {execution.max_wall_s:g} (execution.max_wall_s)")
