"""The ranks of a learner as a group: rank 0 starts the others, watches them, and tells them when it is over.

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
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch._C._distributed_c10d import Store

from learner.config import LearnerConfig
from learner.training.ranks import (
    OPENING,
    CommandChannel,
    Followers,
    Ranks,
    die_with_parent,
    is_of_ranks,
    open_process_group,
    ranks_from_environment,
    share_folder,
    start_followers,
)
from services.process import ENDED, START_AGAIN, StartAgain, Stop, WrongSettings, signal_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PULSE_S = 1.0
_LOOK_S = 0.1
_SETTLE_S = 0.5
"""The ranks that lose another one end, too: so long after the first end, the one that began it has ended as well."""
_EXPLAIN_S = 2.0
_STOP_READ_S, _STOP_RANKS_S = 1.0, 1.5
"""Time for the other ranks to read that they are to end, and then for those of this host to have ended."""


class RankLost(StartAgain):
    """A rank of this learner is gone; the text names it. The run goes on from its newest checkpoint and its journal."""


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

    A rank is silent only while this process runs: one that stood still has not listened. One that opens its model has
    `opening_s` if that is longer.
    """

    def __init__(self, followers: Followers, *, silence_s: float, opening_s: float = 0.0) -> None:
        self.lost: Future[RankLost] = Future()
        self._followers = followers
        self._silence_s = silence_s
        self._opening_s = max(opening_s, silence_s)
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
            opens = heard.place.startswith(OPENING)
            limit_s = self._opening_s if opens else self._silence_s
            if heard.beat and heard.silent_s > limit_s:
                setting = "collective_timeout_s" if limit_s > self._silence_s else "rank_silence_s"
                return (
                    f"rank {rank} is silent for {heard.silent_s:.0f} s (training.{setting} is {limit_s:g}); it was at: "
                    f"{heard.place}"
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


class RankGroup:
    """All ranks of a learner, as rank 0 sees them; a context manager. `commands` are there once it is open.

    The other ranks are started on this host, unless something like torchrun did. At its exit they are told to end, and,
    if they are on several hosts, whether the run is over: each host starts its own ranks again if it is not, and one
    whose ranks have ended well starts none.
    """

    def __init__(self, config: LearnerConfig, *, argv: Sequence[str], stop: Stop | None = None) -> None:
        """`stop` is the wish that rank 0 ends before the run is over."""
        given = ranks_from_environment(os.environ)
        command = [sys.executable, "-m", "learner.command", *argv[1:]]
        self._config = config
        self._followers = start_followers(command, count=config.ranks) if given is None else Followers(ranks=given)
        self.commands: CommandChannel | None = None
        self._stop = stop
        self._failed = False
        self.watch = RankWatch(
            self._followers,
            silence_s=config.training.rank_silence_s,
            opening_s=config.training.collective_timeout_s,
        )

    def __enter__(self) -> Self:
        self.watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.watch.__exit__()
        self._failed = error is not None
        is_lost = self.watch.lost.done()
        if self.commands is not None and not is_lost:
            with contextlib.suppress(RuntimeError):  # the store is gone with the host of another rank
                self.commands.stop(read_within_s=_STOP_READ_S)
        self._followers.close(timeout_s=0.0 if is_lost else _STOP_RANKS_S)

    def _is_over(self) -> bool:
        """On one host rank 0's own end is that of all: whoever started them looks at it."""
        ranks = self._followers.ranks
        asked = self._stop is not None and self._stop.requested
        return ranks.on_host == ranks.count or not (self._failed or asked)

    @property
    def ranks(self) -> Ranks:
        """Rank 0's place."""
        return self._followers.ranks

    def open(self) -> CommandChannel:
        """Blocks until all ranks are there. Raises WrongSettings if they share no folder."""
        config, ranks = self._config, self._followers.ranks
        self.commands = _meet(config, ranks, listener=self._followers.listener)
        self.commands.is_over = self._is_over
        self.watch.listen(self.commands)
        if not _share_folder(config, self.commands, ranks):
            raise WrongSettings(
                f"a rank on another host does not see the run's folder {config.run.folder}: each rank writes its part "
                "of a checkpoint there. Put run.directory on a file system that all hosts share, or use ranks of one "
                "host"
            )
        return self.commands


def follow_group(config: LearnerConfig, ranks: Ranks, work: Callable[[CommandChannel], None]) -> int:
    """The life of a rank other than 0, which does its `work` until it is told to stop; returns the exit code."""
    die_with_parent()
    try:
        commands = _meet(config, ranks, listener=None)
        Pulse(commands, rank=ranks.rank)
        if _share_folder(config, commands, ranks):
            work(commands)
        else:
            while commands.receive().action != "stop":
                continue
    except StartAgain as error:
        logger.warning("rank %d ends, and the learner starts again: %s", ranks.rank, error)
        return START_AGAIN
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        logger.warning("rank %d ends, since another one is gone: %s", ranks.rank, str(error).splitlines()[0])
        return START_AGAIN
    if not commands.ended_over:
        logger.warning("rank %d ends, since rank 0 does before the run is over", ranks.rank)
        return START_AGAIN
    return ENDED


def _share_folder(config: LearnerConfig, commands: CommandChannel, ranks: Ranks) -> bool:
    """Ranks that evaluate, or train adapters of clients, write nothing; rank 0 alone does."""
    writes_nothing = config.evaluation.only or config.tinker.enabled
    return writes_nothing or share_folder(config.run.folder, commands, ranks=ranks)


def _meet(config: LearnerConfig, ranks: Ranks, *, listener: socket.socket | None) -> CommandChannel:
    torch.set_num_threads(config.threads_of_rank)
    torch.manual_seed(config.seed)
    return open_process_group(ranks, timeout_s=config.training.collective_timeout_s, listener=listener)
