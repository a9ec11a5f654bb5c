"""The trainer's thread: results and errors come back, a stop wakes it."""

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedTokenizerFast

import learner.rank_group as group_module
from learner.config import LearnerConfig
from learner.run_ranks import LearnerRanks, first_probe, follow
from learner.training import trainer_thread
from learner.training.adapter_ranks import RanksApart
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer_thread import TrainerThread
from services.process import ENDED, START_AGAIN, Stop, WrongSettings
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


@pytest.mark.parametrize(("kept", "told"), [("", ""), ("its batch", "; the journal holds its batch")])
async def test_a_stop_names_the_work_that_it_cuts_off_and_what_is_kept_of_it_alone(
    kept: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_thread, "_STOP_S", 0.01)
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(20)

    async with TrainerThread() as thread:
        task = asyncio.create_task(thread.run(work, named="the making of a model", kept=kept))
        await asyncio.to_thread(begun.wait, 20)
    release.set()
    await task
    assert caplog.messages == [f"the trainer is in the middle of the making of a model and is cut off{told}"]


async def test_work_after_a_stop_is_refused_by_its_name() -> None:
    async with TrainerThread() as thread:
        pass
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="was closed, and does a snapshot no more"):
            await thread.run(lambda: None, named="a snapshot")


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


@pytest.mark.parametrize(
    ("on_host", "asked", "error", "code"),
    [
        (1, False, None, ENDED),
        (1, True, None, START_AGAIN),
        (1, False, ValueError("no such tokenizer"), START_AGAIN),
        (2, True, None, ENDED),
        (2, False, ValueError("no such tokenizer"), ENDED),
    ],
)
def test_ranks_of_other_hosts_are_started_again_unless_the_run_is_over(
    on_host: int, asked: bool, error: Exception | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": on_host, "MASTER_PORT": store.port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))

    def met(_: LearnerConfig, ranks: Ranks, *, listener: object) -> CommandChannel:
        """Leaves out the meeting alone: no collective is needed for an end."""
        return CommandChannel(CommandChannel(store, ranks=ranks).another_store(), ranks=ranks)

    monkeypatch.setattr(group_module, "_meet", met)
    monkeypatch.setattr(group_module, "_share_folder", lambda *_: False)
    config = LearnerConfig(model=small_model(tmp_path / "model"))

    with ThreadPoolExecutor() as pool:
        stop = Stop()
        with contextlib.suppress(ValueError), LearnerRanks(config, argv=(), stop=stop) as ranks:
            with pytest.raises(WrongSettings, match="does not see the run's folder"):
                ranks.open_trainer(should_stop=lambda: False)
            followed = pool.submit(follow, config, Ranks(rank=1, count=2, on_host=on_host))
            if asked:
                stop.request("SIGTERM")
            if error is not None:
                raise error
        assert followed.result(timeout=60) == code


def test_a_rank_that_has_parted_from_the_others_asks_for_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_meet", lambda *_, **__: SimpleNamespace(ended_over=False))
    monkeypatch.setattr(group_module, "_share_folder", lambda *_: True)
    for name in ("die_with_parent", "Pulse"):
        monkeypatch.setattr(group_module, name, lambda *_, **__: None)

    def part(_: CommandChannel) -> None:
        raise RanksApart("not all ranks did the same")

    config = LearnerConfig(model=small_model(tmp_path / "model"))
    assert group_module.follow_group(config, Ranks(rank=1, count=2), part) == START_AGAIN
