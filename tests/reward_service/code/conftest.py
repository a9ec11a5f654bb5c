"""Fixtures: judging in each kind of sandbox."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import pytest_asyncio

from reward_service.code.arguments import CodeArguments
from reward_service.code.code_judge import CodeJudge
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.program import ExecutionConfig, SandboxKind
from reward_service.verifier.submission import Score

# Generous: the machine may be busy. What a test does not expect to time out must never come near it.
DEADLINE_S = 280.0

Judged = Callable[..., Awaitable[Score]]

_EXECUTION = ExecutionConfig(concurrency=3, max_wall_s=600.0, max_cpu_s=600.0, cgroup="off")


def judging(opened: CodeJudge) -> Judged:
    """Judges code, given as a fenced block of Python, by tests; further arguments are the verifier's."""

    async def judged(code: str, tests: dict[str, object], **arguments: object) -> Score:
        given = {"tests": tests, "timeout_s": 60.0, "total_timeout_s": 200.0, **arguments}
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        completion = f"Here is my solution.\n\n```python\n{code}\n```\n"
        return await opened.score(completion, CodeArguments.model_validate(given), deadline=deadline)

    return judged


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["unsafe", "required"])
async def judge(request: pytest.FixtureRequest) -> AsyncIterator[Judged]:
    """Judges in a sandbox of each kind."""
    async with _opened(cast(SandboxKind, request.param)) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolated() -> AsyncIterator[Judged]:
    """Judges in a sandbox that isolates; without isolation a solution can read what the service can."""
    async with _opened("required") as opened:
        yield opened


@asynccontextmanager
async def _opened(kind: SandboxKind) -> AsyncIterator[Judged]:
    async with open_sandboxes(kind=kind, config=_EXECUTION) as sandboxes:
        assert sandboxes is not None
        judge = CodeJudge(sandbox=sandboxes.programs, execution=_EXECUTION)
        yield judging(judge)
