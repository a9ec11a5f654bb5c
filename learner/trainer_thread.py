"""The trainer's thread, as the event loop sees it: it opens ranks and model, takes work, and can be interrupted."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import torch
import transformers

from learner.config import LearnerConfig
from learner.rank_group import RankGroup, follow_group
from learner.teachers.teachers import check_tokenizers
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from services.process import Stop

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_S = 5.0
"""Longest that a stop waits for the thread to reach a point at which it notices."""
_PROBE_TEXT = "12+30=42. The capital of France is Paris, and two and two make four. One, two, three, four, five."


class TrainerThread:
    """A thread for all that touches torch's models, so that thread-bound settings hold; an async context manager.

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
            logger.warning("the trainer is in the middle of a step and is cut off; the journal holds its batch")

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
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], result: T | None, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, done, result, error)
    except RuntimeError:
        logger.debug("the trainer ended after the event loop: nobody waits for it")


def _settle(done: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if done.done():  # the awaiting task was cancelled
        return
    if error is not None:
        done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"the trainer ended: {error!r}"))
    else:
        done.set_result(result)  # type: ignore[arg-type]


class LearnerRanks(RankGroup):
    """The ranks of a learner that trains a run, with rank 0's trainer. Its trainer's thread is to end before it."""

    def __init__(self, config: LearnerConfig, *, argv: Sequence[str], stop: Stop | None = None) -> None:
        """Raises TeacherFailed, before anything is started, for a teacher that cannot teach this model."""
        check_tokenizers(config.teachers, model=config.model)
        super().__init__(config, argv=argv, stop=stop)

    def open_next_trainer(self, config: LearnerConfig, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer by the next settings that all ranks follow; the one before it has been closed.

        Its `pulls` are kept. Raises as `open_trainer` does.
        """
        commands = self.commands or self.open()
        torch.manual_seed(config.seed)
        return _trainer(config, self.ranks, commands, should_stop=should_stop, keeps_pulls=True)

    def open_trainer(self, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer; blocks until all ranks are there. Raises WrongSettings if they share no folder."""
        commands = self.open()
        return _trainer(self._config, self.ranks, commands, should_stop=should_stop)


def follow(config: LearnerConfig, ranks: Ranks, *, in_turn: Sequence[LearnerConfig] = ()) -> int:
    """The life of a rank other than 0; returns the exit code. `in_turn` are the settings of the trainers that rank 0
    opens with `open_next_trainer`; without any it has the one of `config`.
    """

    def work(commands: CommandChannel) -> None:
        for each in in_turn or (config,):
            torch.manual_seed(each.seed)
            _trainer(each, ranks, commands, should_stop=lambda: False, keeps_pulls=bool(in_turn)).follow()

    return follow_group(config, ranks, work)


def first_probe(model: Path, *, count: int) -> tuple[int, ...]:
    """The beginning of a fixed text in the model's tokens: 2 to `count` of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    # All of the text may be longer than the model takes, of which no more is used than it does.
    return tuple(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False, verbose=False)[:count])


def _trainer(
    config: LearnerConfig,
    ranks: Ranks,
    commands: CommandChannel,
    *,
    should_stop: Callable[[], bool],
    keeps_pulls: bool = False,
) -> Trainer:
    return Trainer(
        config.model,
        algorithm=config.algo,
        config=config.training,
        ranks=ranks,
        commands=commands,
        chat_template=config.run.template_text,
        teachers=[teacher.path for teacher in config.teachers if teacher.path is not None],
        should_stop=should_stop,
        keeps_tokens=(config.samples.enabled or config.trust.enabled)
        and not config.learns_from_files
        and not config.evaluation.only,
        keeps_pulls=keeps_pulls,
    )
