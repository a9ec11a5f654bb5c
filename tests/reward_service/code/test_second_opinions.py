"""A case that may have failed for a reason that is not the program's is run once more elsewhere."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from reward_service.code.code_judge import CodeJudge
from reward_service.code.solution import TimeBudget
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.program import ExecutionConfig
from tests.reward_service.code.conftest import Judged, judging

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {"test_f.py": "from solution import f\ndef test_f(): assert f(2) == 4\n"}
SUITES: tuple[dict[str, object], ...] = (
    {"kind": "stdio", "cases": [{"stdin": "2", "stdout": "4"}, {"stdin": "3", "stdout": "6"}]},
    {"kind": "call", "entry_point": "f", "cases": [{"arguments": [2], "expected": 4}]},
    {"kind": "assert", "cases": [{"code": "assert f(3) == 6"}, {"code": "assert f(2) == 4"}]},
    {"kind": "check", "entry_point": "f", "cases": [{"code": "def check(f): assert f(2) == 4"}]},
    {"kind": "pytest", "files": FILES},
)
# The first time that it is called, something happens to it; a program calls it on its input.
SOURCE = """
import os, signal, sys, time
def f(x):
    if not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        {happens}
    return 2 * x
if sys.argv[0] != "main.py":
    print(f(int(sys.stdin.read())))
"""
LIMITS = {"timeout_s": 6.0, "total_timeout_s": 60.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_to_the_host() -> AsyncIterator[Judged]:
    """Judges in a sandbox in which a program finds what an earlier one has left."""
    execution = ExecutionConfig(concurrency=6, max_wall_s=600.0, max_cpu_s=600.0, cgroup="off", packages=())
    async with open_sandboxes(kind="unsafe", config=execution) as sandboxes:
        assert sandboxes is not None
        yield judging(CodeJudge(sandbox=sandboxes.programs, execution=execution))


@pytest.mark.parametrize("happens", ["time.sleep(1000)", "os.kill(os.getpid(), signal.SIGKILL)"])
async def test_a_program_that_was_held_up_or_killed_once_is_right(
    open_to_the_host: Judged, tmp_path: Path, happens: str
) -> None:
    scores = await asyncio.gather(
        *(
            open_to_the_host(SOURCE.format(marker=str(tmp_path / str(suite["kind"])), happens=happens), suite, **LIMITS)
            for suite in SUITES
        )
    )
    assert [score.reward for score in scores] == [1.0] * len(SUITES), scores


async def test_what_happens_again_is_believed(isolated: Judged) -> None:
    for happens, counted in (("time.sleep(1000)", "timeouts"), ("os.kill(os.getpid(), signal.SIGKILL)", "errors")):
        source = SOURCE.format(marker="/nowhere/marker", happens=happens)
        source = source.replace("open('/nowhere/marker', \"w\").close()", "pass")
        scores = await asyncio.gather(*(isolated(source, suite, timeout_s=1.5) for suite in SUITES[1:4]))
        assert [score.reward for score in scores] == [0.0] * 3
        assert all(score.components[counted] for score in scores), scores


async def test_a_program_whose_sandbox_hangs_runs_in_another(isolated: Judged) -> None:
    # As if a worker had inherited the pipes of all sandboxes that wait: their commands never end.
    held = [os.dup(int(name)) for name in os.listdir("/proc/self/fd") if _is_pipe(name)]
    try:
        score = await isolated("print(input())", {"kind": "stdio", "cases": [{"stdin": "1", "stdout": "1"}]}, **LIMITS)
    finally:
        for handle in held:
            os.close(handle)
    assert score.reward == 1.0


def _is_pipe(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
    except FileNotFoundError:  # that of the listing itself
        return False


async def test_cases_beside_each_other_share_the_time_of_all() -> None:
    budget = TimeBudget(case_s=6.0, total_s=20.0, deadline=1e9)
    got: list[float] = []
    done = [asyncio.Event() for _ in range(5)]

    async def case(number: int) -> None:
        async with budget.share() as seconds:
            got.append(seconds)
            await done[number].wait()
            budget.charge(5.5 if number else 0.5)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(case(number)) for number in range(5)]
        await asyncio.sleep(0)
        await asyncio.wait({group.create_task(asyncio.sleep(0)) for _ in range(10)})
        assert got == [6.0, 6.0, 6.0]  # for a fourth case there is not enough unless one gives some back
        done[0].set()
        await tasks[0]
        done[1].set()
        done[2].set()
        done[3].set()
        done[4].set()
    assert got[:4] == [6.0] * 4
    assert got[4] == pytest.approx(20.0 - 0.5 - 3 * 5.5)
