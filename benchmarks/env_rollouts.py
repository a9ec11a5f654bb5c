"""Load that one env_service carries: 500 conversations at once, of five turns, with an environment that takes 50 ms.

    .venv/bin/python -m benchmarks.env_rollouts [--seconds N] [--turn-s S] [--rollouts N]

The env_service is the real one, alone in this process, with a task that measures how late its event loop is. Learner,
generator and reward service are scripted, in a second process, over real sockets: a turn of 96 tokens comes in parts
over `--turn-s` seconds, half of that to half as much again, as from a generator with room for all. Ideal is what 500
conversations come to that wait for nothing else. Results go to benchmarks/results/env_rollouts.md.
"""

import argparse
import asyncio
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel

from env_service.app import run
from env_service.config import EnvServiceConfig
from env_service.environments.interface import Action, ChatMessage, Opening, Step, Task
from env_service.environments.rules import Rules
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.messages import FinishedLease, Fleet, Hello, Lease, LeaseGrant, OutcomeReceipt, Welcome
from protocol.trajectories import VersionSpan
from services.http.client import HttpClient
from services.process import Stop
from services.zmq.sockets import RouterSocket
from tests.env_service.peers import ScriptedRewards, lease, served, serving

RESULTS = Path(__file__).with_name("results")
MODEL = Path("models/maze-init")
TURNS, STEP_S = 5, 0.05
GROUP_SIZE = 1
TURN_TOKENS, PARTS = 96, 3
_END = 1
_SETTLED_S = 10.0


class NoOptions(BaseModel):
    """It has none."""


class Clerk:
    """Answers four times, each after 50 ms, and then says that all is well."""

    rules = Rules(max_turns=TURNS, turn_tokens=2 * TURN_TOKENS)

    def __init__(self, options: NoOptions) -> None:
        self._turn = 0

    def reset(self, task: Task, seed: int) -> Opening:
        return Opening((ChatMessage("user", f"task {task.seed}"),))

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(STEP_S)
        self._turn += 1
        if self._turn == TURNS:
            return Step(reward=1.0, stop="done")
        return Step((ChatMessage("user", f"turn {self._turn}: go on, there is more to do for you"),))


@dataclass
class ProcessSeries:
    """Measurements in this process: seconds by which the event loop was late, and MiB by second."""

    late_s: list[float] = field(default_factory=list)
    memory_mib: list[tuple[float, float]] = field(default_factory=list)

    def late_at(self, quantile: float) -> float:
        """The lateness that a share of the samples does not exceed."""
        return sorted(self.late_s)[int(quantile * (len(self.late_s) - 1))]


def main() -> int:
    """Measures, prints the table, and writes it; 1 if one of the three aims was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long is measured")
    parser.add_argument("--turn-s", type=float, default=2.0, help="seconds that the generator takes for a turn")
    parser.add_argument("--rollouts", type=int, default=500, help="conversations at once")
    parser.add_argument("--peers", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peers:
        asyncio.run(_Peers(arguments.rollouts, arguments.turn_s).serve())
        return 0
    _make_model()
    command = [sys.executable, "-m", "benchmarks.env_rollouts", "--peers"]
    options = ["--rollouts", str(arguments.rollouts), "--turn-s", str(arguments.turn_s)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as peers:
        try:
            assert peers.stdout is not None
            learner, rewards, counts = peers.stdout.readline().split()
            report = asyncio.run(_measure(arguments, learner=learner, rewards=rewards, counts=counts))
        finally:
            peers.terminate()
    print(report.table)
    RESULTS.joinpath("env_rollouts.md").write_text(report.table, encoding="utf-8")
    return int(not report.good)


def _make_model() -> None:
    """A tokenizer and a chat template, if they are not there."""
    if not (MODEL / "tokenizer.json").exists():
        make = [sys.executable, "-m", "examples.maze.make_model", "examples/maze/run.toml", str(MODEL)]
        subprocess.run(make, check=True)


@dataclass(frozen=True)
class RolloutReport:
    """The table, and whether all aims were met."""

    table: str
    good: bool


class Counts(BaseModel):
    """Trajectories and turns that the scripted learner has received so far."""

    trajectories: int
    turns: int


async def _measure(arguments: argparse.Namespace, *, learner: str, rewards: str, counts: str) -> RolloutReport:
    config = EnvServiceConfig.model_validate(
        {
            "model": MODEL,
            "http": {"port": 0},
            "env_id": "measured",
            "learner": learner,
            "reward_urls": (rewards,),
            "capacity": arguments.rollouts // GROUP_SIZE,
            "environments": ({"name": "clerk", "source": "benchmarks.env_rollouts:Clerk"},),
        }
    )
    stop, seen = Stop(), ProcessSeries()
    async with asyncio.TaskGroup() as tasks, HttpClient() as http:
        service = tasks.create_task(run(config, stop))
        await asyncio.sleep(_SETTLED_S)
        watch = tasks.create_task(_watch(seen))
        cpu, began, first = time.process_time(), time.monotonic(), await http.get(counts, Counts, deadline_s=10)
        await asyncio.sleep(arguments.seconds)
        last, seconds = await http.get(counts, Counts, deadline_s=10), time.monotonic() - began
        cpu_share = (time.process_time() - cpu) / seconds
        watch.cancel()
        stop.request("measured")
        await service
    rate = (last.turns - first.turns) / seconds
    return _report(arguments, seen=seen, rate=rate, done=last.trajectories - first.trajectories, cpu_share=cpu_share)


async def _watch(seen: ProcessSeries) -> None:
    began, told = time.monotonic(), 0.0
    while True:
        asked = time.monotonic()
        await asyncio.sleep(0.01)
        seen.late_s.append(time.monotonic() - asked - 0.01)
        if time.monotonic() - told > 1.0:
            told = time.monotonic()
            seen.memory_mib.append((told - began, _memory_mib()))


def _memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def _report(
    arguments: argparse.Namespace, *, seen: ProcessSeries, rate: float, done: int, cpu_share: float
) -> RolloutReport:
    ideal = arguments.rollouts / (arguments.turn_s + STEP_S)
    half = [mib for at, mib in seen.memory_mib if at > arguments.seconds / 2]
    growth = half[-1] - half[0]
    late, largest = seen.late_at(0.99), seen.late_at(1.0)
    rows = (
        ("turns/s, of the ideal", f"{rate:.0f} of {ideal:.0f}, {rate / ideal:.1%}", "80 %", rate >= 0.8 * ideal),
        ("event loop late, p99", f"{late * 1e3:.0f} ms", "under 100 ms", late < 0.1),
        ("memory, growth in the second half", f"{growth:+.1f} MiB of {half[-1]:.0f}", "under 5 MiB", growth < 5.0),
    )
    lines = [
        "# 500 conversations at once",
        "",
        f"`python -m benchmarks.env_rollouts --seconds {arguments.seconds:g} --turn-s {arguments.turn_s:g}`: "
        f"{arguments.rollouts} conversations of {TURNS} turns, each a lease of its own,",
        f"a step of the environment takes {STEP_S * 1e3:.0f} ms, a turn of {TURN_TOKENS} tokens comes in {PARTS} parts "
        f"over {arguments.turn_s:g} s in the mean. The generator is scripted,",
        "and so are learner and rewards, in a process of their own; env_service and sockets are real. Two cores.",
        "",
        "| measure | value | aim | |",
        "|---|---|---|---|",
        *(f"| {what} | {value} | {aim} | {'met' if met else '**missed**'} |" for what, value, aim, met in rows),
        f"| event loop late, median and largest | {seen.late_at(0.5) * 1e3:.1f} and {largest * 1e3:.0f} ms | | |",
        f"| trajectories | {done:,} | | |",
        f"| CPU of the env_service | {cpu_share:.0%} of a core | | |",
        "",
    ]
    return RolloutReport("\n".join(lines), good=all(met for *_, met in rows))


class _Peers:
    """A learner, a generator and a reward service, by script."""

    def __init__(self, rollouts: int, turn_s: float) -> None:
        self._rollouts = rollouts
        self._turn_s = turn_s
        self._leases = 0
        self._chance = random.Random(0)
        self._counts = Counts(trajectories=0, turns=0)

    async def serve(self) -> None:
        """Prints where the learner, the rewards and the counts are, and serves until it is ended."""
        async with AsyncExitStack() as stack:
            generator = await stack.enter_async_context(served(self._generate, "/v1/generate"))
            rewards = await stack.enter_async_context(served(ScriptedRewards(lambda *_: 1.0).handle, "/v1/score"))
            counts = await stack.enter_async_context(_page(self._count))
            router = RouterSocket.bind("tcp://127.0.0.1:*")
            await stack.enter_async_context(router)
            print(router.address, rewards, counts, flush=True)
            await self._learn(router, generator)

    async def _count(self, _: web.Request) -> web.Response:
        return web.Response(text=self._counts.model_dump_json())

    async def _learn(self, router: RouterSocket, generator: str) -> None:
        while True:
            peer, message = await router.receive()
            match message:
                case Hello():
                    await router.send(peer, Welcome(run="measured", incarnation=1, heartbeat_every_s=5.0))
                    await router.send(peer, Fleet(generators=(serving("g", generator),)))
                    await router.send(peer, LeaseGrant(leases=self._granted(self._rollouts // GROUP_SIZE)))
                case FinishedLease(group=group):
                    self._counts.trajectories += len(group.trajectories)
                    self._counts.turns += sum(len(one.turns) for one in group.trajectories)
                    done = OutcomeReceipt(
                        incarnation=1, lease_id=group.lease_id, attempt=group.attempt, purpose=group.purpose
                    )
                    await router.send(peer, done)
                    await router.send(peer, LeaseGrant(leases=self._granted(1)))
                case _:
                    pass

    def _granted(self, count: int) -> tuple[Lease, ...]:
        first, self._leases = self._leases, self._leases + count
        return tuple(
            lease(number, environment="clerk", task_index=number, group_size=GROUP_SIZE).model_copy(
                update={"timeout_s": 600.0, "sampling": Sampling(max_tokens=2 * TURN_TOKENS)}
            )
            for number in range(first, self._leases)
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = GenerateRequest.model_validate_json(await request.read())
        response = web.StreamResponse()
        await response.prepare(request)
        size, turn_s = TURN_TOKENS // PARTS, self._turn_s * self._chance.uniform(0.5, 1.5)
        for at in range(PARTS):
            await asyncio.sleep(turn_s / PARTS)
            last = at == PARTS - 1
            for index in range(asked.n):
                tokens = self._chance.choices(range(4, 40), k=size)
                told = GeneratePart(
                    index=index,
                    token_ids=tuple([*tokens[:-1], _END] if last else tokens),
                    behavior_logprobs=(-0.5,) * size,
                    version_spans=(VersionSpan(version="1.3", start=0, end=size * (at + 1)),),
                    finish_reason="stop" if last else None,
                )
                await response.write(told.model_dump_json().encode() + b"\n")
        await response.write_eof()
        return response


@asynccontextmanager
async def _page(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The address of a page."""
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}/"
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    raise SystemExit(main())
