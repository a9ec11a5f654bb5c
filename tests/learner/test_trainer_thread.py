"""The trainer's thread: results and errors come back, a stop wakes it."""

import asyncio
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from learner.trainer_thread import TrainerThread, first_probe
from tests.headway.mistakes.small_model import small_model


async def test_work_runs_in_one_thread_and_its_result_comes_back() -> None:
    async with TrainerThread() as thread, asyncio.timeout(60):
        names = [await thread.run(lambda: threading.current_thread().name) for _ in range(3)]
    assert names == ["trainer"] * 3


async def test_an_error_of_the_work_is_raised_where_it_is_awaited_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    async with TrainerThread() as thread, asyncio.timeout(60):
        with pytest.raises(ValueError, match="no such model"):
            await thread.run(fail)
        assert await thread.run(lambda: 3) == 3


async def test_a_stop_interrupts_a_wait_and_is_seen_by_the_work() -> None:
    waiting: Future[None] = Future()
    begun = threading.Event()
    seen: list[bool] = []

    async with asyncio.timeout(60):
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

    async with TrainerThread() as thread, asyncio.timeout(60):
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


def test_the_first_probe_of_a_model_that_takes_less_than_its_text_worries_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_model(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=8).save_pretrained(folder)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    assert len(first_probe(folder, count=6)) == 6
    assert caplog.messages == []


async def test_the_end_gives_a_step_under_way_more_time_than_the_other_ranks_need_to_end() -> None:
    waited: list[float | None] = []
    thread = TrainerThread()
    ending = SimpleNamespace(join=waited.append, is_alive=lambda: False)
    vars(thread)["_thread"] = ending
    await thread.__aexit__(None, None, None)
    assert waited == [5.0]
