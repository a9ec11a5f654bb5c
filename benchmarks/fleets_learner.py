"""The learner's side of `benchmarks.fleets`: all of a learner's event loop, and a trainer that takes batches and
trains nothing.

Journal, sockets, HTTP, fleet and publisher are the real ones, wired as `learner.service` wires them. Only the
collective is left out: the members meet and are sent nothing, so that a thousand of them fit on one machine. The parent
process asks for one thing a line on the standard input, and is answered in JSON.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.intake import GROUP_SIZE, as_a_process
from benchmarks.machine import rss
from learner.config import LearnerConfig
from learner.event_loop import EventLoopParts, ledger_config
from learner.journal.journal import FOLDER, Journal
from learner.recovery import recover
from learner.reports.run_records import Records
from learner.reports.status import LearnerMetrics
from learner.weights import broadcast
from learner.weights.probe import Probe
from learner.weights.process_group import BroadcastGroup, Meeting, lay_out
from learner.weights.published import Snapshot
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener
from services.http.status import recent_failures
from services.process import Stop
from services.zmq.sockets import RouterSocket

BATCHES_IN_FLIGHT = 32
"""So many steps' groups are in flight at once, which is what makes the size of a step; at least 32 groups."""
PROBE_TEXTS, PROBE_TEXT_TOKENS = 16, 17
_WEIGHTS = 1 << 18
_LOOK_S = 0.01


@dataclass
class Window:
    """Lateness and busy time of the event loop in seconds, since they were last asked for."""

    began: float = field(default_factory=time.perf_counter)
    cpu_began: float = field(default_factory=time.process_time)
    late: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


class LoopWatch:
    """Wakes up every 10 ms: how late it is, and how much CPU the event loop's thread has used without a turn for it.

    The latter leaves out what other processes on the machine do.
    """

    def __init__(self) -> None:
        self._window = Window()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due, before = time.perf_counter() + _LOOK_S, time.thread_time()
            await asyncio.sleep(_LOOK_S)
            self._window.late.append(max(0.0, time.perf_counter() - due))
            self._window.busy.append(time.thread_time() - before)

    def ended(self) -> dict[str, Any]:
        """The window, which ends here; the next one begins."""
        past = self._window
        shown = {
            "wall_s": time.perf_counter() - past.began,
            "cpu_s": time.process_time() - past.cpu_began,
            "late_ms": _quantiles(past.late),
            "busy_ms": _quantiles(past.busy),
        }
        self._window = Window()
        return shown


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    return {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)
        for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


class _NothingSent:
    """In the place of torch's process group."""

    def broadcast(self, *_: object) -> "_NothingSent":
        return self

    def wait(self, *_: object) -> None:
        """It is there at once."""


class PaperMeeting(Meeting):
    """Everybody is there at once."""

    def join(self, **_: object) -> BroadcastGroup:
        group: Any = _NothingSent()
        return BroadcastGroup(group=group, device="cpu", store=self._store)


def config_of(folder: Path, *, in_flight: int) -> LearnerConfig:
    """A run that asks for as many groups at once as its env_services have room for."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 1 << 17, "hidden_size": 8}), encoding="utf-8")
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    return LearnerConfig.model_validate(
        {
            "model": model,
            "run": {"name": "fleet", "directory": folder},
            "steps": 1 << 20,
            "groups_per_step": max(32, in_flight // BATCHES_IN_FLIGHT),
            "max_lag": 3 * BATCHES_IN_FLIGHT,
            "lag": {"pacing": "full"},
            "algo": {"type": "grpo"},
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": 8, "environment": "addition"},
            "samples": {"enabled": False},
        }
    )


class MeasuredLearner:
    """A learner without ranks. `asked` answers the parent's questions."""

    def __init__(self, parts: EventLoopParts, watch: LoopWatch) -> None:
        self._parts = parts
        self._watch = watch
        self._published = -1

    async def train(self) -> None:
        """Takes batch after batch."""
        intake = self._parts.intake
        while True:
            batch = await intake.take()
            await intake.trained(batch.version + 1)

    async def asked(self, line: str) -> dict[str, Any]:
        """The answer to one line."""
        answers: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "window": self._ended, "publish": self._publish, "memory": self._memory,
        }  # fmt: skip
        return await answers[line.strip()]()

    async def _ended(self) -> dict[str, Any]:
        books = self._parts.intake.books()
        return {
            **self._watch.ended(),
            "accepted": books.accepted,
            "running": books.running,
            "steps": self._parts.recovered.ledger.version,
            "serving": len(self._parts.fleet.serving()),
        }

    async def _publish(self) -> dict[str, Any]:
        version = self._parts.recovered.ledger.version
        while version <= self._published:
            await asyncio.sleep(0.05)
            version = self._parts.recovered.ledger.version
        self._published = version
        began, cpu = time.perf_counter(), time.process_time()
        self._parts.publisher.offer(_snapshot(version))
        if self._parts.fleet.members():
            await self._parts.publisher.wait_until_served(version)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}

    async def _memory(self) -> dict[str, Any]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return {"bytes": rss()}


def _snapshot(version: int) -> Snapshot:
    weights = torch.full((_WEIGHTS,), float(version + 1))
    texts = tuple(tuple(range(start, start + PROBE_TEXT_TOKENS)) for start in range(PROBE_TEXTS))
    logprobs = tuple(-0.1 * token for text in texts for token in text[1:])
    return Snapshot(
        version=version, buckets=lay_out([("w", weights)], bucket_bytes=1 << 20), probe=Probe(texts, logprobs)
    )


async def serve(folder: Path, *, in_flight: int) -> dict[str, Any]:
    """Answers until the standard input ends."""
    broadcast.Meeting = PaperMeeting  # type: ignore[attr-defined]
    config = config_of(folder, in_flight=in_flight)
    run = config.run.folder
    run.mkdir(parents=True)
    registry = Metrics("learner", run=config.run.name)
    metrics = LearnerMetrics(registry)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(Listener(host="127.0.0.1", port=0))
        parts = EventLoopParts(
            config=config, registry=registry, metrics=metrics, incarnation=1,
            socket=await stack.enter_async_context(RouterSocket.bind("tcp://127.0.0.1:*")),
            client=await stack.enter_async_context(HttpClient()),
            records=stack.enter_context(Records(folder=run, total_steps=config.steps)),
            recovered=recover(run, config=ledger_config(config), resume=False),
            journal=stack.enter_context(Journal.open(run / FOLDER)),
            failures=stack.enter_context(recent_failures()),
        )  # fmt: skip
        watch = LoopWatch()
        side = MeasuredLearner(parts, watch)
        parts.waits.started()
        loops = {**parts.loops(listener, Stop()), "train": side.train(), "watch": watch.run()}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
            socket = parts.intake._flow.env_services._socket
            print(json.dumps({"zmq": socket.address, "http": listener.url, "model": str(config.model)}), flush=True)
            await answer_lines(side.asked)
            for task in tasks:
                task.cancel()
    return {}


async def answer_lines(asked: Callable[[str], Awaitable[dict[str, Any]]]) -> None:
    """Answers the lines of the standard input, one after the other, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode():
        print(json.dumps(await asked(line)), flush=True)


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleets_learner", description=__doc__)
    parser.add_argument("--in-flight", type=int, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        as_a_process(serve(Path(folder), in_flight=given.in_flight))


if __name__ == "__main__":
    main()
