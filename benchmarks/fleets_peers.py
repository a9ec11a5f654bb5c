"""The other side of `benchmarks.fleets`: generators and env_services by script, all of them in this process.

Each generator listens at a port of its own, announces itself over HTTP, downloads the weights from the learner, and
answers its control calls. Each env_service is a ZeroMQ socket of its own that says hello, heartbeats, holds leases, and
sends groups when it is told to. What they receive is counted by kind. Of a fleet only the kind is read.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgpack  # noqa: TID251 - a heartbeat of many leases, made without their models
import uvloop
import zmq  # noqa: TID251 - a thousand sockets in one context
import zmq.asyncio  # noqa: TID251
from aiohttp import web

from benchmarks.fleets_learner import answer_lines
from benchmarks.intake import group_of
from protocol.codec import decode, encode, sealed
from protocol.fleet import Announcement, Commit, CommitResult, JoinedGroup, PrepareResult
from protocol.generation import GeneratorState
from protocol.messages import EnvironmentInfo, FinishedLease, Hello, Lease, LeaseGrant
from protocol.model import PROTOCOL_VERSION
from services.model_folder import fingerprint_directory

TOKENS = 12
HEARTBEAT_S = 2.0
ANNOUNCE_S = 2.0


class Stirred:
    """Something has come in."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set = self._event.set

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Returns when the condition holds, or at the end of the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not condition():
                    self._event.clear()
                    await self._event.wait()


class Generators:
    """Scripted generators, each at its own port."""

    def __init__(self, learner: str, fingerprints: Any, *, stamp: Callable[[str, str], None], stirred: Stirred) -> None:
        self.stirred = stirred
        self._learner = learner
        self._fingerprints = fingerprints
        self.stamp = stamp
        self._names: dict[int, str] = {}
        self.serving: dict[str, str] = {}
        self.committed_at: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self._began = time.monotonic()
        self._runner: web.AppRunner
        self._session: aiohttp.ClientSession
        self._announcing: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/weights/{what}", self._on_weights)
        app.router.add_get("/v1/state", self._on_state)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        for task in self._announcing:
            task.cancel()
        await self._session.close()
        await self._runner.cleanup()

    async def start(self, count: int) -> None:
        """So many more; returns when all have committed a version."""
        names = []
        for number in range(len(self._names), len(self._names) + count):
            site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            names.append((f"g-{number:04d}", port))
            self._names[port] = names[-1][0]
        for name, port in names:
            self._announcing.append(asyncio.create_task(self._announce(name, port, at_once=True)))
        await self.stirred.until(lambda: all(name in self.serving for name, _ in names))

    async def _announce(self, name: str, port: int, *, at_once: bool) -> None:
        while True:
            if not at_once:
                await asyncio.sleep(ANNOUNCE_S * random.uniform(0.9, 1.1))
            at_once = False
            said = Announcement(
                generator_id=name, instance=f"{name}-i", url=f"http://127.0.0.1:{port}",
                protocol_version=PROTOCOL_VERSION, fingerprints=self._fingerprints, backend="gloo",
                max_model_len=4096, serving_version=self.serving.get(name),
            )  # fmt: skip
            try:
                async with self._session.post(
                    f"{self._learner}/v1/generators", data=said.model_dump_json(),
                    headers={"content-type": "application/json"},
                ) as answer:  # fmt: skip
                    self.calls[f"announce {answer.status}"] += 1
                    await answer.read()
            except aiohttp.ClientError as error:
                self.calls[f"announce {type(error).__name__}"] += 1

    async def _on_state(self, request: web.Request) -> web.Response:
        self.calls["state"] += 1
        name, passed = self._name_of(request), time.monotonic() - self._began
        version = self.serving.get(name)
        return _json(
            GeneratorState(
                generator_id=name,
                serving=version is not None,
                policy_version=version,
                running=8,
                tokens_generated=0,
                idle_s=passed / 2,
                uptime_s=passed,
            )
        )

    def _name_of(self, request: web.Request) -> str:
        assert request.transport is not None
        return self._names[request.transport.get_extra_info("sockname")[1]]

    async def _on_weights(self, request: web.Request) -> web.Response:
        what, text = request.match_info["what"], await request.read()
        body = json.loads(text)
        name = self._name_of(request)
        self.calls[what] += 1
        if what == "group":
            return _json(JoinedGroup(epoch=body["epoch"]))
        if what == "prepare":
            return _json(PrepareResult(version=body["version"], receive_s=0.01))
        if what == "pull":
            await self._download(body["version"])
            return _json(PrepareResult(version=body["version"], receive_s=0.01))
        commit = Commit.model_validate_json(text)
        self.serving[name] = commit.version
        self.committed_at[name] = time.perf_counter()
        self.stirred.set()
        if name == "g-0000":
            self.stamp(commit.version, f"{name}-i")
        logprobs = tuple(-0.1 * token for text in commit.probe for token in text[1:])
        return _json(
            CommitResult(
                version=commit.version,
                fingerprint=f"f{commit.version}",
                probe_logprobs=logprobs,
                load_s=0.01,
                pause_s=0.01,
            )
        )

    async def _download(self, version: str) -> None:
        url = f"{self._learner}/v1/weights/{version}"
        async with self._session.get(f"{url}/plan") as answer:
            plan = await answer.json()
        for index, bucket in enumerate(plan["buckets"]):
            async with self._session.get(f"{url}/buckets/{index}?offset=0&length={bucket['nbytes']}") as answer:
                await answer.read()


def _json(model: Any) -> web.Response:
    return web.Response(text=model.model_dump_json(), content_type="application/json")


class Envs:
    """Scripted env_services in one context."""

    def __init__(self, learner: str, fingerprints: Any, *, stirred: Stirred) -> None:
        self.stirred = stirred
        self._learner = learner
        self._fingerprints = fingerprints
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._sockets: list[Any] = []
        self.leases: list[list[Lease]] = []
        self.welcomed: set[int] = set()
        self.fleet_at: dict[int, float] = {}
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.finished = 0
        self.acknowledged = 0
        self.rate = 0.0
        self.version = "1.0"
        self._template = group_of(TOKENS)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, count: int, *, capacity: int) -> None:
        """Says hello for all of them; returns when all are welcome."""
        info = EnvironmentInfo(name="addition", train_tasks=1000, evaluation_tasks=0)
        for number in range(count):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, f"env-{number}".encode())
            socket.connect(self._learner)
            self._sockets.append(socket)
            self.leases.append([])
            hello = Hello(
                env_id=f"e-{number:04d}", instance="i", capacity=capacity, environments=(info,),
                tokenizer=self._fingerprints.tokenizer, chat_template=self._fingerprints.chat_template,
            )  # fmt: skip
            await socket.send_multipart(encode(hello))
            self._tasks.append(asyncio.create_task(self._receive(number)))
            self._tasks.append(asyncio.create_task(self._heartbeat(number)))
        await self.stirred.until(lambda: len(self.welcomed) == count)
        self._tasks.append(asyncio.create_task(self._finish()))

    async def _receive(self, number: int) -> None:
        socket = self._sockets[number]
        while True:
            frames = await socket.recv_multipart()
            kind = _kind(frames[0])
            counted = self.counts[kind]
            counted[0] += 1
            counted[1] += sum(map(len, frames))
            if kind == "fleet":
                self.fleet_at[number] = time.perf_counter()
            elif kind == "welcome":
                self.welcomed.add(number)
            elif kind == "acknowledged":
                self.acknowledged += 1
            elif kind == "granted":
                message = decode(frames)
                assert isinstance(message, LeaseGrant)
                self.leases[number].extend(message.leases)
            self.stirred.set()

    async def _heartbeat(self, number: int) -> None:
        await asyncio.sleep(random.uniform(0, HEARTBEAT_S))
        while True:
            running = [
                {
                    "incarnation": lease.incarnation, "lease_id": lease.lease_id, "attempt": lease.attempt,
                    "purpose": "train", "oldest_version": self.version, "waits_for": "generators",
                }
                for lease in self.leases[number]
            ]  # fmt: skip
            header = msgpack.packb([PROTOCOL_VERSION, "heartbeat", {"running": running}])
            await self._sockets[number].send_multipart(sealed([header]))
            await asyncio.sleep(HEARTBEAT_S)

    async def _finish(self) -> None:
        """`rate` groups a second, of env_services in turn."""
        began, due = time.perf_counter(), 0.0
        number = 0
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            due += self.rate * (now - began)
            began = now
            for _ in range(int(due)):
                due -= 1.0
                for _ in range(len(self.leases)):
                    number = (number + 1) % len(self.leases)
                    if self.leases[number]:
                        await self._send_group(number, self.leases[number].pop(0))
                        break

    async def _send_group(self, number: int, lease: Lease) -> None:
        named = {"lease_id": lease.lease_id, "attempt": lease.attempt, "task_index": lease.task_index}
        self.finished += 1
        await self._sockets[number].send_multipart(encode(FinishedLease(group=self._template.model_copy(update=named))))

    def stamp(self, version: str, instance: str) -> None:
        """Sets the version, and the process that proved it, under which all later trajectories were sampled."""
        self.version = version
        trajectories = tuple(
            one.model_copy(
                update={
                    "version_spans": tuple(
                        span.model_copy(update={"version": version, "instance": instance}) for span in one.version_spans
                    )
                }
            )
            for one in self._template.trajectories
        )
        self._template = self._template.model_copy(update={"trajectories": trajectories})


def _kind(header: bytes) -> str:
    reader = msgpack.Unpacker()
    reader.feed(header[:64])
    reader.read_array_header()
    reader.skip()
    return str(reader.unpack())


class Peers:
    """Does what the parent asks for: one line, a word and numbers."""

    def __init__(self, *, zmq_address: str, http: str, fingerprints: Any) -> None:
        self.stirred = Stirred()
        self.envs = Envs(zmq_address, fingerprints, stirred=self.stirred)
        self.generators = Generators(http, fingerprints, stamp=self.envs.stamp, stirred=self.stirred)

    async def asked(self, line: str) -> dict[str, Any]:
        """The answer to one line."""
        word, *numbers = line.split()
        answers: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "generators": self._generators, "envs": self._envs, "rate": self._rate, "counts": self._counts,
            "filled": self._filled, "drained": self._drained,
        }  # fmt: skip
        return await answers[word](*map(int, numbers))

    async def _generators(self, count: int) -> dict[str, Any]:
        """Starts them; answers when all serve, and every env_service was told after the last one did."""
        began = time.perf_counter()
        await self.generators.start(count)
        served = time.perf_counter()
        last = max(self.generators.committed_at.values())
        await self.stirred.until(lambda: all(self.envs.fleet_at.get(each, 0.0) >= last for each in self.envs.welcomed))
        told = max(self.envs.fleet_at.values(), default=last)
        return {"serving_s": served - began, "told_after_s": told - last}

    async def _envs(self, count: int, capacity: int) -> dict[str, Any]:
        began = time.perf_counter()
        await self.envs.start(count, capacity=capacity)
        return {"welcomed_s": time.perf_counter() - began}

    async def _filled(self, in_flight: int) -> dict[str, Any]:
        """Answers when so many leases are held."""
        began = time.perf_counter()
        await self.stirred.until(lambda: sum(map(len, self.envs.leases)) >= in_flight, within_s=120.0)
        return {"filled_s": time.perf_counter() - began, "leases": sum(map(len, self.envs.leases))}

    async def _rate(self, rate: int) -> dict[str, Any]:
        self.envs.rate = float(rate)
        return {}

    async def _drained(self) -> dict[str, Any]:
        """Answers when all that was sent is acknowledged, or half a minute has passed."""
        await self.stirred.until(lambda: self.envs.acknowledged >= self.envs.finished, within_s=30.0)
        return {"lost": self.envs.finished - self.envs.acknowledged}

    async def _counts(self) -> dict[str, Any]:
        """Returns the counts of messages and calls since the last time, and begins anew."""
        found = {kind: tuple(counted) for kind, counted in self.envs.counts.items()}
        calls = dict(self.generators.calls)
        self.envs.counts.clear()
        self.generators.calls.clear()
        return {"received": found, "calls": calls, "finished": self.envs.finished}


async def run(given: argparse.Namespace) -> None:
    """Answers until the standard input ends."""
    fingerprints = fingerprint_directory(given.model)
    peers = Peers(zmq_address=given.zmq, http=given.http, fingerprints=fingerprints)
    await peers.generators.open()
    print("{}", flush=True)
    try:
        await answer_lines(peers.asked)
    finally:
        await peers.generators.close()


def main() -> None:
    """Runs all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleets_peers", description=__doc__)
    parser.add_argument("--zmq", required=True)
    parser.add_argument("--http", required=True)
    parser.add_argument("--model", type=Path, required=True)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
