"""Coroutines of users run in a loop of their own: what one of them blocks is not another's fault, nor the process."""

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path

import pytest

from services.user_code import LetOut
from services.user_loop import HeldUp, TookTooLong, UserLoop, at_home, one_thread

WAIT_S = 20.0
SHOWN: ContextVar[str] = ContextVar("shown", default="nothing")
ROOT = Path(__file__).parents[2]


class Blocker:
    """Blocks whatever loop it runs in until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    async def __call__(self) -> bool:
        self.begun.set()
        return self.go_on.wait(WAIT_S)


async def _thread() -> threading.Thread:
    return threading.current_thread()


async def _sleeps() -> str:
    await asyncio.sleep(0.05)
    return "slept"


@pytest.fixture
def loop() -> UserLoop:
    return UserLoop()


async def test_what_blocks_there_does_not_block_here(loop: UserLoop) -> None:
    blocker = Blocker()
    running = asyncio.create_task(loop.run(blocker))
    await asyncio.to_thread(blocker.begun.wait, WAIT_S)

    blocker.go_on.set()

    assert await running, "it was let go by the loop that waits for it"


async def test_who_blocks_is_too_slow_and_who_waits_meanwhile_is_not(loop: UserLoop) -> None:
    async def blocks() -> str:
        time.sleep(1.5)  # noqa: ASYNC251 - what is tested
        return "blocked"

    async with asyncio.timeout(WAIT_S):
        slow = asyncio.create_task(loop.run(blocks, limit_s=30.0))
        await asyncio.sleep(0)
        fast = asyncio.create_task(loop.run(_sleeps, limit_s=0.5))

        assert await fast == "slept"
        assert await slow == "blocked"
        with pytest.raises(TookTooLong):
            await loop.run(lambda: asyncio.sleep(60), limit_s=0.1)


async def test_who_blocks_after_another_is_not_held_to_account_for_him(loop: UserLoop) -> None:
    async def blocks() -> str:
        time.sleep(0.9)  # noqa: ASYNC251 - what is tested
        return "blocked"

    async with asyncio.timeout(WAIT_S):
        assert await asyncio.gather(*[loop.run(blocks, limit_s=20.0, block_s=1.6) for _ in range(3)]) == ["blocked"] * 3


async def test_what_begins_again_hears_at_once_that_its_loop_was_left(loop: UserLoop) -> None:
    blocker = Blocker()
    slow = asyncio.create_task(loop.run(blocker, limit_s=WAIT_S, block_s=0.3))
    await asyncio.to_thread(blocker.begun.wait, WAIT_S)
    innocent = asyncio.create_task(loop.run(_sleeps, limit_s=WAIT_S, block_s=0.3))

    async with asyncio.timeout(WAIT_S / 2):
        with pytest.raises(HeldUp):
            await innocent
        with pytest.raises(
            TookTooLong, match=r"it blocked its event loop \(.*test_user_loop.py, line \d+, in __call__"
        ):
            await slow
        assert await loop.run(_sleeps, limit_s=WAIT_S) == "slept"
    blocker.go_on.set()


async def test_a_loop_that_is_blocked_for_too_long_is_left_and_a_new_one_goes_on(loop: UserLoop) -> None:
    blocker = Blocker()
    old = await loop.run(_thread)
    slow = asyncio.create_task(loop.run(blocker, limit_s=0.5))
    await asyncio.to_thread(blocker.begun.wait, WAIT_S)
    innocent = asyncio.create_task(loop.run(_sleeps, limit_s=0.5))

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(TookTooLong):
            await slow
        with pytest.raises(HeldUp):
            await innocent
        assert await loop.run(_thread) is not old
    blocker.go_on.set()


async def test_who_waits_in_a_loop_that_comes_back_ends_there(loop: UserLoop) -> None:
    blocker = Blocker()
    with one_thread():
        old = await loop.run(_thread)
        slow = asyncio.create_task(loop.run(blocker, limit_s=0.3))
        await asyncio.to_thread(blocker.begun.wait, WAIT_S)
        innocent = asyncio.create_task(loop.run(_sleeps, limit_s=WAIT_S))
        with pytest.raises(TookTooLong):
            await slow
        await asyncio.sleep(0.5)
        blocker.go_on.set()

        assert await innocent == "slept"
        assert await loop.run(_thread) is old, "what was made there belongs to that loop"


async def test_a_cancellation_reaches_the_coroutine_which_may_clean_up(loop: UserLoop) -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def works() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned.set()

    running = asyncio.create_task(loop.run(works))
    await asyncio.to_thread(begun.wait, WAIT_S)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned.is_set()


async def _cancels() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


async def _cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def _quits() -> None:
    sys.exit("I quit")


@pytest.mark.parametrize("ends", [_cancels, _cancels_itself, _quits])
async def test_code_that_would_end_more_than_itself_is_at_fault(loop: UserLoop, ends: object) -> None:
    with pytest.raises(LetOut, match=r"let out (CancelledError|SystemExit: I quit) \("):
        await loop.run(ends)  # type: ignore[arg-type]

    assert await loop.run(_sleeps) == "slept"


async def test_a_task_that_exits_does_not_end_the_loop(loop: UserLoop) -> None:
    async def starts() -> None:
        asyncio.get_running_loop().create_task(_quits())

    await loop.run(starts)

    assert await loop.run(_sleeps, limit_s=WAIT_S) == "slept"


async def test_the_callers_context_is_seen(loop: UserLoop) -> None:
    async def shows() -> str:
        return SHOWN.get()

    SHOWN.set("something")

    assert await loop.run(shows) == "something"


async def test_what_belongs_to_a_loop_can_be_awaited_from_another(loop: UserLoop) -> None:
    home, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    async def asks() -> str:
        said: str = await at_home(home, lambda: asyncio.shield(answer))
        return said

    running = asyncio.create_task(loop.run(asks))
    await asyncio.sleep(0.05)
    answer.set_result("here")

    assert await running == "here"


async def test_one_that_never_began_leaves_no_coroutine_open(loop: UserLoop) -> None:
    blocker, never = Blocker(), _sleeps()
    slow = asyncio.create_task(loop.run(blocker))
    await asyncio.to_thread(blocker.begun.wait, WAIT_S)
    waits = asyncio.create_task(loop.run(lambda: never))
    await asyncio.sleep(0.5)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    blocker.go_on.set()
    await slow
    await loop.run(_sleeps)

    assert inspect.getcoroutinestate(never) == inspect.CORO_CLOSED


def test_a_process_ends_though_code_blocks_its_loop() -> None:
    program = """
import asyncio, time
from services.user_loop import TookTooLong, user_loop

async def blocks():
    time.sleep(600)

async def main():
    try:
        await user_loop().run(blocks, limit_s=0.3)
    except TookTooLong:
        print("too long")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, "too long\n"), done.stderr
