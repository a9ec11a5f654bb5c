"""The verifier as the service offers it: arguments, errors by whose fault they are, deadlines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest
from pydantic import JsonValue

from protocol.rewards import ScoreError, ScoreItem
from reward_service.code.code_judge import CodeJudge, CodeLane
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.program import ExecutionConfig, Program, RunEnd, Running, Sandbox
from reward_service.verifier.submission import InfrastructureError, Outcome, Score

CODE = "```python\ndef f(x):\n    return x\n```"
CASE: dict[str, JsonValue] = {"arguments": [1], "expected": 1}


class BrokenSandbox:
    """A sandbox in which nothing starts."""

    async def run(self, program: Program) -> RunEnd:
        raise InfrastructureError("no sandbox was ready")

    @asynccontextmanager
    async def open(self, program: Program) -> AsyncIterator[Running]:
        raise InfrastructureError("no sandbox was ready")
        yield


class FullSandbox(BrokenSandbox):
    """A sandbox in which no place ever becomes free."""

    async def run(self, program: Program) -> RunEnd:
        await asyncio.Event().wait()
        raise AssertionError

    @asynccontextmanager
    async def open(self, program: Program) -> AsyncIterator[Running]:
        await asyncio.Event().wait()
        raise AssertionError
        yield


class DyingProgram:
    """A program whose sandbox dies."""

    async def write(self, data: bytes, *, deadline: float) -> None:
        """It goes nowhere."""

    async def readline(self, *, deadline: float) -> bytes:
        return b""

    async def ended(self) -> RunEnd:
        raise InfrastructureError("the keeper of a sandbox died")

    async def killed(self) -> RunEnd:
        return await self.ended()


class HeldUpProgram(DyingProgram):
    """A program that was killed at its own limit, since it had waited for others all that time."""

    async def ended(self) -> RunEnd:
        return RunEnd(exit_code=None, signal=9, stdout=b"", stderr=b"", timed_out=True, wall_s=80.0)


class BusySandbox(BrokenSandbox):
    """A sandbox in which nothing gets on."""

    @asynccontextmanager
    async def open(self, program: Program) -> AsyncIterator[Running]:
        yield HeldUpProgram()


class DyingSandbox(BrokenSandbox):
    """A sandbox that dies while a program runs."""

    @asynccontextmanager
    async def open(self, program: Program) -> AsyncIterator[Running]:
        yield DyingProgram()


def suite_for(kind: str) -> dict[str, JsonValue]:
    cases: dict[str, dict[str, JsonValue]] = {
        "call": {"entry_point": "f", "cases": [CASE]},
        "stdio": {"cases": [{"stdout": "1"}]},
        "assert": {"cases": [{"code": "assert f(1) == 1"}]},
        "check": {"entry_point": "f", "cases": [{"code": "def check(f): assert f(1) == 1"}]},
        "pytest": {"files": {"test_f.py": "def test_f(): pass"}},
    }
    return {"kind": kind, **cases[kind]}


async def outcome(
    sandbox: Sandbox | None,
    *,
    concurrency: int = 2,
    deadline_s: float = 60.0,
    completion: str = CODE,
    **arguments: JsonValue,
) -> Outcome:
    judge = None if sandbox is None else CodeJudge(sandbox=sandbox, execution=ExecutionConfig(concurrency=concurrency))
    item = ScoreItem(id="1", verifier="code", completion=completion, arguments=arguments)
    judged = CodeLane(judge).judge(item, deadline=asyncio.get_running_loop().time() + deadline_s)
    return await judged if isinstance(judged, Awaitable) else judged


def error(got: Outcome) -> ScoreError:
    assert isinstance(got.result, ScoreError), got.result
    return got.result


async def test_without_a_sandbox_an_item_is_told_how_to_get_one() -> None:
    told = error(await outcome(None, tests=suite_for("call")))
    assert told.kind == "user"
    assert "sandbox = 'required'" in told.message


@pytest.mark.parametrize("kind", ["call", "stdio", "assert", "check", "pytest"])
async def test_trouble_of_the_sandbox_is_an_error_of_the_infrastructure(kind: str) -> None:
    assert error(await outcome(BrokenSandbox(), tests=suite_for(kind))).kind == "infrastructure"


@pytest.mark.parametrize("kind", ["call", "stdio", "assert", "check", "pytest"])
async def test_a_sandbox_that_dies_is_an_error_of_the_infrastructure(kind: str) -> None:
    assert error(await outcome(DyingSandbox(), tests=suite_for(kind))).kind == "infrastructure"


@pytest.mark.parametrize("kind", ["call", "stdio", "assert", "check", "pytest"])
async def test_an_item_that_finds_no_place_ends_at_its_deadline(kind: str) -> None:
    told = error(await outcome(FullSandbox(), tests=suite_for(kind), deadline_s=0.1))
    assert told.kind == "infrastructure"
    assert "deadline" in told.message


async def test_a_completion_without_code_gets_nothing_and_needs_no_sandbox() -> None:
    got = await outcome(BrokenSandbox(), tests=suite_for("call"), completion="I cannot do that.")
    assert got.result == Score(reward=0.0, components={"extracted": 0.0})


@pytest.mark.parametrize("kind", ["call", "stdio", "assert", "check"])
async def test_tests_without_cases_are_an_error_of_the_data(kind: str) -> None:
    told = error(await outcome(BrokenSandbox(), tests={**suite_for(kind), "cases": []}))
    assert (told.kind, "no case" in told.message) == ("data", True)


async def test_arguments_that_do_not_fit_are_an_error_of_the_user() -> None:
    for arguments in ({}, {"tests": {"kind": "guess"}}, {"tests": suite_for("call"), "timeout": 1}):
        assert error(await outcome(BrokenSandbox(), **arguments)).kind == "user"


async def test_other_languages_have_stdio_alone() -> None:
    told = error(await outcome(BrokenSandbox(), tests=suite_for("call"), language="bash", completion="```sh\nls\n```"))
    assert (told.kind, "stdio" in told.message) == ("user", True)


@pytest.mark.parametrize("kind", ["call", "assert", "check", "pytest"])
async def test_a_program_that_only_waited_is_no_failure_of_the_solution(kind: str) -> None:
    told = error(await outcome(BusySandbox(), tests=suite_for(kind)))
    assert (told.kind, "held up" in told.message) == ("infrastructure", True)


async def test_a_result_that_no_program_could_send_is_an_error_of_the_data() -> None:
    case: JsonValue = {"arguments": [1], "expected": "x" * (1 << 20)}
    told = error(await outcome(BrokenSandbox(), tests={"kind": "call", "entry_point": "f", "cases": [case]}))
    assert (told.kind, "max_output_bytes" in told.message) == ("data", True)


async def test_tests_that_are_code_need_two_places() -> None:
    told = error(await outcome(BrokenSandbox(), tests=suite_for("assert"), concurrency=1))
    assert (told.kind, "concurrency" in told.message) == ("user", True)


async def test_times_are_within_the_maxima_of_the_operator() -> None:
    for kind, name in (("stdio", "timeout_s"), ("call", "total_timeout_s")):
        told = error(await outcome(BrokenSandbox(), tests=suite_for(kind), timeout_s=500.0, total_timeout_s=500.0))
        assert (told.kind, told.message.startswith(name)) == ("user", True)


@pytest.mark.parametrize("limit", ["max_processes", "max_disk_mib"])
@pytest.mark.parametrize("kind", ["call", "stdio", "assert"])
async def test_programs_take_no_more_than_the_operator_grants(limit: str, kind: str) -> None:
    execution = ExecutionConfig.model_validate({"concurrency": 2, "cgroup": "off", "packages": (), limit: 16})
    completion = "```python\ndef f(x):\n    return x\n\nprint(f(1))\n```"
    arguments: dict[str, JsonValue] = {"tests": suite_for(kind), "timeout_s": 15.0}
    item = ScoreItem(id="0", verifier="code", completion=completion, arguments=arguments)
    async with open_sandboxes(kind="unsafe", config=execution) as sandboxes:
        assert sandboxes is not None
        lane = CodeLane(CodeJudge(sandbox=sandboxes.programs, execution=execution))
        judged = lane.judge(item, deadline=asyncio.get_running_loop().time() + 90.0)
        got = await judged if isinstance(judged, Awaitable) else judged
    assert isinstance(got.result, Score), got.result
    assert got.result.reward == 1.0
