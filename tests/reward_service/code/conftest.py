"""Fixtures: judging with each kind of sandbox that this machine has."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from protocol.rewards import ScoreError
from reward_service.code.arguments import CodeArguments
from reward_service.code.judge import CodeJudge
from reward_service.sandbox.program import Sandbox
from reward_service.sandbox.unsafe import UnsafeSandbox
from reward_service.verifier import Score

# Generous: the machine may be busy. What a test does not expect to time out must never come near it.
DEADLINE_S = 280.0

Judged = Callable[..., Awaitable[Score]]


@pytest.fixture
def sandbox() -> Sandbox:
    return UnsafeSandbox(concurrency=4)


@pytest_asyncio.fixture
async def judge(sandbox: Sandbox) -> AsyncIterator[Judged]:
    """Judges code, given as a fenced block of Python, by tests; further arguments are the verifier's."""
    opened = CodeJudge(sandbox=sandbox, parallel=2, pairs=2)

    async def judged(code: str, tests: dict[str, object], **arguments: object) -> Score:
        given = {"tests": tests, "timeout_s": 60.0, "total_timeout_s": 200.0, **arguments}
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        completion = f"Here is my solution.\n\n```python\n{code}\n```\n"
        return await opened.score(completion, CodeArguments.model_validate(given), deadline=deadline)

    yield judged


@pytest_asyncio.fixture
async def isolated(judge: Judged) -> AsyncIterator[Judged]:
    """Judges in a sandbox that isolates; without one, a solution can read whatever the service can."""
    yield judge
