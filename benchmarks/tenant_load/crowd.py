"""Steps of 50 active tenants of the Tinker API: alone, beside 1,000 idle ones, and beside one that disturbs.

    python -m benchmarks.tenant_load.crowd [--idle N] [--active N] [--think S] [--seconds S] [--output FILE]

A learner serves a random Qwen3 of 2 layers x 64. Each tenant has a key, a session with its heartbeats, and a training
model of rank 8 on all layers which has taken a step. The active ones take a step again and again, a forward_backward
of a sequence of 32 tokens and an optim_step, and think between two: the time from the sending of both to the answer to
both is measured. One disturber after another then does its worst for the same time: it floods as fast as it can, sends
losses that are not finite, bodies of 100 MB plain and packed, wrong shapes, or leaves sessions behind whose operations
wait for ever.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow
from numpy.typing import NDArray

from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from benchmarks.tenant_load.server import MODEL, TenantServer, key_of, serving
from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import write_tensor

RESULTS = Path(__file__).parents[1] / "results" / "tenant_crowd.md"
_LENGTH, _RANK, _HEARTBEAT_S = 32, 8, 10.0
_BAD = "bad"
_FLOOD_AT_ONCE = 8
_HUGE = 100_000_000
_AT_ONCE = 16


@dataclass(frozen=True)
class CrowdPhase:
    """Steps of the active tenants while something went on: seconds each, CPU seconds of the server a second, and its
    memory at the end. `told`: how often the disturber was answered, and with what at first.
    """

    name: str
    steps: Sequence[float]
    cpu: float
    memory_mb: float
    told: str = ""

    @property
    def p50_ms(self) -> float:
        """The median."""
        return 1e3 * statistics.median(self.steps)

    @property
    def p99_ms(self) -> float:
        """All but one in a hundred took less."""
        return 1e3 * float(np.quantile(self.steps, 0.99))


@dataclass
class HttpTenant:
    """A tenant that speaks HTTP itself: the SDK would take a process for each."""

    http: aiohttp.ClientSession
    url: str
    name: str
    session_id: str = ""
    model_id: str = ""
    seq_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def post(self, route: str, body: Any, **more: str) -> tuple[int, Any]:
        """Status, and JSON or bytes; `more` are headers."""
        headers = {"X-API-Key": key_of(self.name), **more}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/x-protobuf"
        payload = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.url}/api/v1/{route}", headers=headers, **payload) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.read()

    async def begin(self, number: int) -> None:
        """A session, and a training model that has taken a step."""
        self.session_id = (await self.post("create_session", {"tags": [], "sdk_version": "0.38"}))[1]["session_id"]
        body = {"session_id": self.session_id, "model_seq_id": 0, "base_model": MODEL}
        accepted = await self.post("create_model", {**body, "lora_config": {"rank": _RANK, "seed": number}})
        self.model_id = (await self.result(accepted))["model_id"]
        await self.step()

    async def step(self) -> None:
        """A forward_backward and an optim_step, and their answers."""
        passed = await self.forward_backward()
        body = {"model_id": self.model_id, "seq_id": next(self.seq_ids), "adam_params": {"learning_rate": 1e-3}}
        stepped = await self.post("optim_step", body)
        await asyncio.gather(self.result(passed), self.result(stepped))

    async def forward_backward(self, **changed: Any) -> tuple[int, Any]:
        """Sends one, and returns the answer to the sending."""
        body = forward_backward(self.model_id, next(self.seq_ids), **changed)
        return await self.post("forward_backward", body)

    async def result(self, accepted: tuple[int, Any]) -> Any:
        """The result of what was accepted."""
        assert accepted[0] == 200, accepted
        while True:
            status, found = await self.post("retrieve_future", {"request_id": accepted[1]["request_id"]})
            if status != 408:
                return found

    async def live(self) -> None:
        """Heartbeats until cancelled."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            with suppress(aiohttp.ClientError):
                await self.post("session_heartbeat", {"session_id": self.session_id})


def forward_backward(model_id: str, seq_id: int, *, rows: int = 1, advantage: float = 1.0, short: int = 0) -> bytes:
    """A request of importance_sampling; `short`: the advantages lack so many tokens."""
    request = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn="importance_sampling")
    for row in range(rows):
        datum = request.data.add()
        tokens = (np.arange(_LENGTH + 1) * 7 + row + seq_id) % 250
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        inputs: dict[str, NDArray[Any]] = {
            "target_tokens": tokens[1:].astype(np.int64),
            "logprobs": np.full(_LENGTH, -5.0, np.float32),
            "advantages": np.full(_LENGTH - short, advantage, np.float32),
        }
        for name, values in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(write_tensor(values))
    return bytes(request.SerializeToString())


class Crowd:
    """All tenants of a server."""

    def __init__(self, http: aiohttp.ClientSession, server: TenantServer, arguments: argparse.Namespace) -> None:
        self._server, self._arguments = server, arguments

        def tenants(kind: str, count: int) -> list[HttpTenant]:
            return [HttpTenant(http, server.url, name) for name in names(kind, count)]

        self._active, self._idle = tenants("active", arguments.active), tenants("idle", arguments.idle)
        self._bad = HttpTenant(http, server.url, _BAD)
        self._living: list[asyncio.Task[None]] = []

    async def phases(self) -> list[CrowdPhase]:
        """Everything, one after the other."""
        _huge_bodies()  # making them takes this process a while
        await self._begin([*self._active, self._bad])
        await self._phase("warm-up", None)
        found = [await self._phase("nothing", None)]
        await self._begin(self._idle)
        found.append(await self._phase(f"{len(self._idle):,} idle tenants", None))
        for name, disturb in _DISTURBERS.items():
            found.append(await self._phase(name, disturb))
            await asyncio.sleep(1.0)
        found.append(await self._phase("nothing again", None))
        for task in self._living:
            task.cancel()
        return found

    async def _begin(self, tenants: Sequence[HttpTenant]) -> None:
        room = asyncio.Semaphore(_AT_ONCE)

        async def begin(number: int, tenant: HttpTenant) -> None:
            async with room:
                await tenant.begin(number)

        await asyncio.gather(*(begin(number, tenant) for number, tenant in enumerate(tenants)))
        self._living += [asyncio.create_task(tenant.live()) for tenant in tenants if tenant is not self._bad]

    async def _phase(self, name: str, disturb: "Disturber | None") -> CrowdPhase:
        steps: list[float] = []
        began, used = time.monotonic(), self._server.cpu_s
        end = began + self._arguments.seconds
        told: list[str] = []
        task = None if disturb is None else asyncio.create_task(disturb(self._bad, told))
        await asyncio.gather(*(self._steps(tenant, end, steps) for tenant in self._active))
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        cpu = (self._server.cpu_s - used) / (time.monotonic() - began)
        print(f"{name}: {len(steps)} steps", flush=True)
        said = "<br>".join(f"{count} times: {answer}" for answer, count in Counter(told).most_common(3))
        return CrowdPhase(name, steps, cpu, self._server.memory_mb, said)

    async def _steps(self, tenant: HttpTenant, end: float, steps: list[float]) -> None:
        think = self._arguments.think
        await asyncio.sleep(think * (int(tenant.name.partition("-")[2]) / len(self._active)))
        while time.monotonic() < end:
            began = time.monotonic()
            await tenant.step()
            steps.append(time.monotonic() - began)
            await asyncio.sleep(think)


@cache
def _huge_bodies() -> list[tuple[bytes, dict[str, str]]]:
    """Of 100 MB, as they are and packed, with their headers."""
    request = MESSAGES["ForwardBackwardRequest"](model_id="any", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(_HUGE // 3)
    datum.loss_fn_inputs["target_tokens"].CopyFrom(write_tensor(np.zeros(_HUGE // 12, np.int64)))
    plain = request.SerializeToString()
    packed = pyarrow.compress(plain, codec="zstd", asbytes=True)
    return [(plain, {}), (packed, {"Content-Encoding": "zstd"})]


Disturber = Callable[[HttpTenant, list[str]], Coroutine[None, None, None]]


async def _flood(bad: HttpTenant, told: list[str]) -> None:
    async def rush() -> None:
        while True:
            status, answer = await bad.forward_backward(rows=8)
            told.append("accepted" if status == 200 else f"{status} {answer['queue_state_reason'][-40:]}")

    try:
        async with asyncio.TaskGroup() as rushing:
            for _ in range(_FLOOD_AT_ONCE):
                rushing.create_task(rush())
    finally:
        await bad.post("unload_model", {"model_id": bad.model_id})


async def _not_finite(bad: HttpTenant, told: list[str]) -> None:
    await _anew(bad)
    for number in itertools.count():
        accepted = await bad.forward_backward(advantage=3e38 if number % 2 else np.nan)
        told.append(_error(await bad.result(accepted)))


async def _shapes(bad: HttpTenant, told: list[str]) -> None:
    await _anew(bad)
    while True:
        told.append(_error(await bad.result(await bad.forward_backward(short=1))))


async def _huge(bad: HttpTenant, told: list[str]) -> None:
    while True:
        for body, more in _huge_bodies():
            with suppress(aiohttp.ClientError):  # the connection is closed on what is too large
                status, answer = await bad.post("forward_backward", body, **more)
                told.append(f"{status} {answer['error']['message']}")
            await asyncio.sleep(0.1)


async def _dead(bad: HttpTenant, told: list[str]) -> None:
    while True:
        await _anew(bad)
        next(bad.seq_ids)
        await bad.forward_backward()


def _error(result: Any) -> str:
    return str(result["error"]) if isinstance(result, dict) else "done"


async def _anew(bad: HttpTenant) -> None:
    """A new session, so that nothing of the former one is waited for."""
    bad.seq_ids = itertools.count(1)
    await bad.begin(0)


_DISTURBERS: dict[str, Disturber] = {
    "a flood": _flood,
    "losses that are not finite": _not_finite,
    "bodies of 100 MB": _huge,
    "wrong shapes": _shapes,
    "sessions left behind": _dead,
}


def names(kind: str, count: int) -> list[str]:
    """Of tenants."""
    return [f"{kind}-{number}" for number in range(count)]


def main() -> None:
    """Measures, prints and writes the table."""
    arguments = _arguments()
    phases, memory = asyncio.run(_measured(arguments))
    print_and_write(_report(phases, memory, arguments), arguments.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--active", type=int, default=50)
    parser.add_argument("--think", type=float, default=4.0, help="seconds between two steps of a tenant")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--output", type=Path, help=f"file for the table, such as {RESULTS}")
    return parser.parse_args()


async def _measured(arguments: argparse.Namespace) -> tuple[list[CrowdPhase], float]:
    everybody = [*names("active", arguments.active), *names("idle", arguments.idle), _BAD]
    with tempfile.TemporaryDirectory(prefix="tenant-crowd-") as folder, serving(Path(folder), everybody) as server:
        memory = server.memory_mb
        connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as http:
            return await Crowd(http, server, arguments).phases(), memory


def _report(phases: Sequence[CrowdPhase], memory: float, arguments: argparse.Namespace) -> str:
    lines = [
        "# Many tenants, and one that disturbs",
        "",
        f"`python -m benchmarks.tenant_load.crowd`: {arguments.active} active tenants, who think {arguments.think:g} s "
        f"between two steps; {arguments.seconds:g} s a row. {described_machine()}. The server had {memory:.0f} MB when "
        "it was ready.",
        "",
        "| beside them | steps | p50, ms | p99, ms | CPU of the server | its memory, MB | answers to the disturber |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.name} | {len(each.steps)} | {each.p50_ms:.0f} | {each.p99_ms:.0f} | {each.cpu:.2f} | "
        f"{each.memory_mb:.0f} | {each.told} |"
        for each in phases
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
