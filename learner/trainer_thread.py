"""The trainer's thread, as the event loop sees it: it opens ranks and model, takes work, and can be interrupted.

A rank is lost when it has ended, is silent, or a collective among the ranks has failed:

    other ranks: Pulse, a thread ──▶ the ranks' store ──▶ rank 0: RankWatch, a thread ──▶ `lost` ──▶ the event loop
    children of rank 0 ── exit code ─────────────────────▶

A collective alone would notice a rank that hangs after minutes, and not say which it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import Store

from learner.config import LearnerConfig
from learner.teachers.teachers import check_tokenizers
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
from services.process import ENDED, START_AGAIN, StartAgain, Stop, WrongSettings, signal_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PULSE_S = 1.0
_LOOK_S = 0.1
_SETTLE_S = 0.5
"""The ranks that lose another one end, too: so long after the first end, the one that began it has ended as well."""
_EXPLAIN_S = 2.0
_STOP_S = 5.0
"""Longest that a stop waits for the thread to reach a point at which it notices."""
_STOP_READ_S, _STOP_RANKS_S = 1.0, 1.5
"""Time for the other ranks to read that they are to end, and then for those of this host to have ended."""
_PROBE_TEXT = "12+30=42. The capital of France is Paris, and two and two make four. One, two, three, four, five."


class RankLost(StartAgain):
    """A rank of this learner is gone; the text names it. The run goes on from its newest checkpoint and its journal."""


def is_of_ranks(error: BaseException) -> bool:
    """True if an error is one of a collective among ranks, or of their store; gloo's have no type of their own."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "nccl", "processgroup"))
    )


class Pulse:
    """Tells rank 0 from a thread that this rank lives, and what it is doing."""

    def __init__(self, commands: CommandChannel, *, rank: int) -> None:
        self._commands = commands
        self._key = _key(rank)
        self._store = commands.another_store()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        beat = 0
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and this process ends
            while True:
                beat += 1
                self._store.set(self._key, json.dumps({"beat": beat, "place": self._commands.place}))
                time.sleep(_PULSE_S)


@dataclass
class _RankPulse:
    """The newest pulse of a rank, and for how many seconds there was no newer one."""

    beat: int = 0
    place: str = ""
    silent_s: float = 0.0


class RankWatch:
    """Rank 0's eye on the others, from their start to its exit. A context manager.

    A rank is silent only while this process runs: one that stood still has not listened.
    """

    def __init__(self, followers: Followers, *, silence_s: float) -> None:
        self.lost: Future[RankLost] = Future()
        self._followers = followers
        self._silence_s = silence_s
        self._store: Store | None = None
        self._own_place: Callable[[], str] = str
        self._heard = {rank: _RankPulse() for rank in range(1, followers.ranks.count)}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank_watch", daemon=True)

    def __enter__(self) -> Self:
        if self._heard:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._heard:
            self._thread.join()

    def listen(self, commands: CommandChannel) -> None:
        """From here on the ranks' store is open, and each rank that has once been heard is to be heard again."""
        self._own_place = lambda: commands.place
        self._store = commands.another_store() if self._heard else None

    async def during(self, work: Coroutine[None, None, T]) -> T:
        """The result of `work`, which the ranks take part in. Raises RankLost as soon as one of them is lost."""
        working = asyncio.ensure_future(work)
        lost: asyncio.Future[RankLost] = asyncio.wrap_future(self.lost)
        either: set[asyncio.Future[Any]] = {working, lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not lost.done() and (error := working.exception()) is not None and self._heard and is_of_ranks(error):
                await asyncio.wait({lost}, timeout=_EXPLAIN_S)
                raise (lost.result() if lost.done() else self._late(error)) from error
            if lost.done():
                raise lost.result()
            return working.result()
        finally:
            working.cancel()
            await asyncio.wait({working})

    def _late(self, error: BaseException) -> RankLost:
        """No rank has ended or fallen silent: those are late that are elsewhere than this one."""
        here = self._own_place()
        others = [f"rank {rank} is at: {heard.place}" for rank, heard in self._heard.items() if heard.beat]
        others += [f"rank {rank} was never heard of" for rank, heard in self._heard.items() if not heard.beat]
        text = str(error).splitlines()[0]
        return RankLost(f"a collective among the ranks failed; rank 0 is at: {here}; {'; '.join(others)}; {text}")

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * _LOOK_S), now
            found = self._gone() or self._silent(passed)
            if found is not None:
                self.lost.set_result(RankLost(found))
                self._followers.close(timeout_s=0.0)  # or rank 0 may wait for one that hangs
                return

    def _gone(self) -> str | None:
        if self._followers.failed() is None:
            return None
        self._ended.wait(_SETTLE_S)
        codes = {rank: code for rank, code in self._followers.ended().items() if code != 0}
        # One that was killed comes before one that failed, and that before those that only lost another one.
        rank, code = min(codes.items(), key=lambda one: (one[1] == START_AGAIN, one[1] > 0, one[0]))
        if code > 0:
            return f"rank {rank} has ended with code {code}; its own log says why"
        return f"rank {rank} was killed by {signal_name(-code)}"

    def _silent(self, passed_s: float) -> str | None:
        if self._store is None:
            return None
        for rank, heard in self._heard.items():
            heard.silent_s += passed_s
            self._hear(rank, heard)
            if heard.beat and heard.silent_s > self._silence_s:
                return (
                    f"rank {rank} is silent for {heard.silent_s:.0f} s (training.rank_silence_s is "
                    f"{self._silence_s:g}); it was at: {heard.place}"
                )
        return None

    def _hear(self, rank: int, heard: _RankPulse) -> None:
        assert self._store is not None, "looked at by the caller"
        with contextlib.suppress(RuntimeError):  # a store that is gone with its host is a silence, too
            if self._store.check([_key(rank)]):
                told = json.loads(self._store.get(_key(rank)))
                if told["beat"] != heard.beat:
                    heard.beat, heard.place, heard.silent_s = told["beat"], told["place"], 0.0


def _key(rank: int) -> str:
    return f"pulse/{rank}"


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


class LearnerRanks:
    """All ranks of a learner, as rank 0 sees them; a context manager. Its trainer's thread is to end before it.

    The other ranks are started on this host, unless something like torchrun did. At its exit they are told to end, and,
    if they are on several hosts, whether the run is over: each host starts its own ranks again if it is not, and one
    whose ranks have ended well starts none.
    """

    def __init__(self, config: LearnerConfig, *, argv: Sequence[str], stop: Stop | None = None) -> None:
        """`stop` is the wish that rank 0 ends before the run is over.

        Raises TeacherFailed, before anything is started, for a teacher that cannot teach this model.
        """
        check_tokenizers(config.teachers, model=config.model)
        given = ranks_from_environment(os.environ)
        command = [sys.executable, "-m", "learner.command", *argv[1:]]
        self._config = config
        self._followers = start_followers(command, count=config.ranks) if given is None else Followers(ranks=given)
        self._commands: CommandChannel | None = None
        self._stop = stop
        self._failed = False
        self.watch = RankWatch(self._followers, silence_s=config.training.rank_silence_s)

    def __enter__(self) -> Self:
        self.watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.watch.__exit__()
        self._failed = error is not None
        is_lost = self.watch.lost.done()
        if self._commands is not None and not is_lost:
            with contextlib.suppress(RuntimeError):  # the store is gone with the host of another rank
                self._commands.stop(read_within_s=_STOP_READ_S)
        self._followers.close(timeout_s=0.0 if is_lost else _STOP_RANKS_S)

    def _is_over(self) -> bool:
        """On one host rank 0's own end is that of all: whoever started them looks at it."""
        ranks = self._followers.ranks
        asked = self._stop is not None and self._stop.requested
        return ranks.on_host == ranks.count or not (self._failed or asked)

    def open_next_trainer(self, config: LearnerConfig, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer by the next settings that all ranks follow; the one before it has been closed.

        Its `pulls` are kept. Raises as `open_trainer` does.
        """
        commands = self._commands or self._open_commands()
        torch.manual_seed(config.seed)
        return _trainer(config, self._followers.ranks, commands, should_stop=should_stop, keeps_pulls=True)

    def open_trainer(self, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer; blocks until all ranks are there. Raises WrongSettings if they share no folder."""
        commands = self._open_commands()
        return _trainer(self._config, self._followers.ranks, commands, should_stop=should_stop)

    def _open_commands(self) -> CommandChannel:
        config, ranks = self._config, self._followers.ranks
        self._commands = _meet(config, ranks, listener=self._followers.listener)
        self._commands.is_over = self._is_over
        self.watch.listen(self._commands)
        if not _share_folder(config, self._commands, ranks):
            raise WrongSettings(
                f"a rank on another host does not see the run's folder {config.run.folder}: each rank writes its part "
                "of a checkpoint there. Put run.directory on a file system that all hosts share, or use ranks of one "
                "host"
            )
        return self._commands


def follow(config: LearnerConfig, ranks: Ranks, *, in_turn: Sequence[LearnerConfig] = ()) -> int:
    """The life of a rank other than 0; returns the exit code. `in_turn` are the settings of the trainers that rank 0
    opens with `open_next_trainer`; without any it has the one of `config`.
    """
    die_with_parent()
    try:
        commands = _meet(config, ranks, listener=None)
        Pulse(commands, rank=ranks.rank)
        if _share_folder(config, commands, ranks):
            for each in in_turn or (config,):
                torch.manual_seed(each.seed)
                _trainer(each, ranks, commands, should_stop=lambda: False, keeps_pulls=bool(in_turn)).follow()
        else:
            while commands.receive().action != "stop":
                continue
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        logger.warning("rank %d ends, since another one is gone: %s", ranks.rank, str(error).splitlines()[0])
        return START_AGAIN
    if not commands.ended_over:
        logger.warning("rank %d ends, since rank 0 does before the run is over", ranks.rank)
        return START_AGAIN
    return ENDED


def first_probe(model: Path, *, count: int) -> tuple[int, ...]:
    """The beginning of a fixed text in the model's tokens: 2 to `count` of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    # All of the text may be longer than the model takes, of which no more is used than it does.
    return tuple(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False, verbose=False)[:count])


def _share_folder(config: LearnerConfig, commands: CommandChannel, ranks: Ranks) -> bool:
    return config.evaluation.only or share_folder(config.run.folder, commands, ranks=ranks)


def _meet(config: LearnerConfig, ranks: Ranks, *, listener: socket.socket | None) -> CommandChannel:
    torch.set_num_threads(config.threads_of_rank)
    torch.manual_seed(config.seed)
    return open_process_group(ranks, timeout_s=config.training.collective_timeout_s, listener=listener)


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
