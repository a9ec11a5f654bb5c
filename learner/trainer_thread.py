"""The trainer's thread, as the event loop sees it: it opens ranks and model, takes work, and can be interrupted."""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import torch
import transformers

from learner.config import LearnerConfig
from learner.teachers.teachers import check_tokenizers
from learner.training.rank_watch import Pulse, RankWatch, is_of_ranks
from learner.training.ranks import (
    CommandChannel,
    Followers,
    Ranks,
    die_with_parent,
    open_process_group,
    ranks_from_environment,
    share_folder,
    start_followers,
)
from learner.training.trainer import Trainer
from services.process import ENDED, START_AGAIN, WrongSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

_STOP_S = 5.0
"""How long a stop waits for the thread to reach a point at which it notices."""


class TrainerThread:
    """One thread for all that touches torch's models, so that thread-bound settings hold; an async context manager.

    It is a daemon: a thread in the middle of a long kernel does not keep a stopped process alive.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._interrupts: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._serve, name="trainer", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        for interrupt in self._interrupts:
            interrupt()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            log.warning("the trainer is in the middle of a step and is cut off; the journal holds its batch")

    def stopping(self) -> bool:
        """True if the thread should leave what it does; asked from the thread."""
        return self._stopping.is_set()

    def on_stop(self, interrupt: Callable[[], None]) -> None:
        """Called in the event loop at a stop, to wake the thread from a wait."""
        self._interrupts.append(interrupt)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in the thread and returns its result, or raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
                _hand_over(loop, done, None, error)
            else:
                _hand_over(loop, done, result, None)

        self._work.put(call)
        return await done

    def _serve(self) -> None:
        while (call := self._work.get()) is not None:
            call()


def _hand_over(
    loop: asyncio.AbstractEventLoop, done: "asyncio.Future[T]", result: T | None, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, done, result, error)
    except RuntimeError:
        log.debug("the trainer ended after the event loop: nobody waits for it")


def _settle(done: "asyncio.Future[T]", result: T | None, error: BaseException | None) -> None:
    if done.done():  # the awaiting task was cancelled
        return
    if error is not None:
        done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"the trainer ended: {error!r}"))
    else:
        done.set_result(result)  # type: ignore[arg-type]


_STOP_READ_S, _STOP_S = 1.0, 1.5
"""Time for the other ranks to read that they are to end, and then for those of this host to have ended."""
_PROBE_TEXT = "12+30=42. The capital of France is Paris, and two and two make four. One, two, three, four, five."


class LearnerRanks:
    """All ranks of a learner, as rank 0 sees them; a context manager. Its trainer's thread is to end before it.

    The other ranks are started on this host, unless something like torchrun did. At its exit they are told to end.
    """

    def __init__(self, config: LearnerConfig, *, argv: Sequence[str]) -> None:
        """Raises TeacherFailed, before anything is started, for a teacher that cannot teach this model."""
        check_tokenizers(config.teachers, model=config.model)
        given = ranks_from_environment(os.environ)
        command = [sys.executable, "-m", "learner.command", *argv[1:]]
        self._config = config
        self._followers = start_followers(command, count=config.ranks) if given is None else Followers(ranks=given)
        self._commands: CommandChannel | None = None
        self.watch = RankWatch(self._followers, silence_s=config.training.rank_silence_s)

    def __enter__(self) -> Self:
        self.watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.__exit__()
        is_lost = self.watch.lost.done()
        if self._commands is not None and not is_lost:
            with contextlib.suppress(RuntimeError):  # the store is gone with the host of another rank
                self._commands.stop(read_within_s=_STOP_READ_S)
        self._followers.close(timeout_s=0.0 if is_lost else _STOP_S)

    def open_trainer(self, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer; blocks until all ranks are there. Raises WrongSettings if they share no folder."""
        config, ranks = self._config, self._followers.ranks
        self._commands = _meet(config, ranks, listener=self._followers.listener)
        self.watch.listen(self._commands)
        if not _share_folder(config, self._commands, ranks):
            raise WrongSettings(
                f"a rank on another host does not see the run's folder {config.run.folder}: each rank writes its part "
                "of a checkpoint there. Put run.directory on a file system that all hosts share, or use ranks of one "
                "host"
            )
        return _trainer(config, ranks, self._commands, should_stop=should_stop)


def follow(config: LearnerConfig, ranks: Ranks) -> int:
    """The life of a rank other than 0; returns the exit code."""
    die_with_parent()
    try:
        commands = _meet(config, ranks, listener=None)
        Pulse(commands, rank=ranks.rank)
        if _share_folder(config, commands, ranks):
            _trainer(config, ranks, commands, should_stop=lambda: False).follow()
        else:
            while commands.receive().action != "stop":
                continue
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        log.warning("rank %d ends, since another one is gone: %s", ranks.rank, str(error).splitlines()[0])
        return START_AGAIN
    return ENDED


def first_probe(model: Path, *, count: int) -> tuple[int, ...]:
    """The beginning of a fixed text in the model's tokens: 2 to `count` of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tuple(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)[:count])


def _share_folder(config: LearnerConfig, commands: CommandChannel, ranks: Ranks) -> bool:
    return config.evaluation.only or share_folder(config.run.folder, commands, ranks=ranks)


def _meet(config: LearnerConfig, ranks: Ranks, *, listener: socket.socket | None) -> CommandChannel:
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    return open_process_group(ranks, timeout_s=config.training.collective_timeout_s, listener=listener)


def _trainer(
    config: LearnerConfig, ranks: Ranks, commands: CommandChannel, *, should_stop: Callable[[], bool]
) -> Trainer:
    return Trainer(
        config.model,
        algorithm=config.algo,
        config=config.training,
        ranks=ranks,
        commands=commands,
        teachers=[teacher.path for teacher in config.teachers if teacher.path is not None],
        should_stop=should_stop,
    )
