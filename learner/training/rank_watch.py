"""Noticing that a rank is lost: it has ended, it is silent, or a collective among the ranks has failed.

    other ranks: Pulse, a thread ──▶ the ranks' store ──▶ rank 0: RankWatch, a thread ──▶ `lost` ──▶ the event loop
    children of rank 0 ── exit code ─────────────────────▶

A collective alone would notice a rank that hangs after minutes, and not say which it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from learner.training.ranks import CommandChannel, Followers
from services.process import START_AGAIN, StartAgain

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PULSE_S = 1.0
_LOOK_S = 0.1
_SETTLE_S = 0.5
"""The ranks that lose another one end, too: so long after the first end, the one that began it has ended as well."""
_EXPLAIN_S = 2.0


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
class _Heard:
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
        self._heard = {rank: _Heard() for rank in range(1, followers.ranks.count)}
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
        return f"rank {rank} was killed by {_name_of(-code)}"

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

    def _hear(self, rank: int, heard: _Heard) -> None:
        assert self._store is not None, "looked at by the caller"
        with contextlib.suppress(RuntimeError):  # a store that is gone with its host is a silence, too
            if self._store.check([_key(rank)]):
                told = json.loads(self._store.get(_key(rank)))
                if told["beat"] != heard.beat:
                    heard.beat, heard.place, heard.silent_s = told["beat"], told["place"], 0.0


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
