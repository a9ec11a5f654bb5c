"""The trainer's thread: results and errors come back, a stop wakes it."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from learner.trainer_thread import TrainerThread


async def test_work_runs_in_one_thread_and_its_result_comes_back() -> None:
    async with TrainerThread() as thread, asyncio.timeout(5):
        names = [await thread.run(lambda: threading.current_thread().name) for _ in range(3)]
    assert names == ["trainer"] * 3


async def test_an_error_of_the_work_is_raised_where_it_is_awaited_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    async with TrainerThread() as thread, asyncio.timeout(5):
        with pytest.raises(ValueError, match="no such model"):
            await thread.run(fail)
        assert await thread.run(lambda: 3) == 3


async def test_a_stop_interrupts_a_wait_and_is_seen_by_the_work() -> None:
    waiting: Future[None] = Future()
    begun = threading.Event()
    seen: list[bool] = []

    async with asyncio.timeout(5):
        async with TrainerThread() as thread:
            thread.on_stop(lambda: waiting.set_result(None))

            def work() -> None:
                seen.append(thread.stopping())
                begun.set()
                waiting.result()
                seen.append(thread.stopping())

            task = asyncio.create_task(thread.run(work))
            await asyncio.to_thread(begun.wait)
    await task
    assert seen == [False, True]


async def test_work_whose_caller_was_cancelled_does_no_harm() -> None:
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(5)

    async with TrainerThread() as thread, asyncio.timeout(5):
        task = asyncio.create_task(thread.run(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait([task])
        release.set()
        assert await thread.run(lambda: 1) == 1


def test_work_that_outlives_the_event_loop_does_no_harm() -> None:
    release, begun = threading.Event(), threading.Event()
    thread = TrainerThread()

    def work() -> None:
        begun.set()
        release.wait(5)

    async def leave() -> None:
        thread._thread.start()
        task = asyncio.create_task(thread.run(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())
    release.set()
    thread._work.put(None)
    thread._thread.join(5)
    assert not thread._thread.is_alive()
