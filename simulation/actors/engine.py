"""A scripted engine: what a worker does with weights, and how fast, how well and whether it answers at all.

The truth about weights: what each version was trained on, so that no stamp, journal or proof has to be believed. A
simulated policy is the row of batches that made it. Its tensors hold a digest of that row, an engine that loads them
samples tokens whose logprobs name the row, and a trainer reads there which policy really sampled what it trains on,
and behind which tokens.
"""

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import xxhash

from protocol.fleet import BucketSpec, JoinGroup, Prepare
from protocol.generation import GeneratePart
from protocol.trajectories import VersionSpan
from simulation.world import collective
from simulation.world.clock import active
from simulation.world.cores import Cores
from simulation.world.network import Network
from simulation.world.process import Process

_SCALE = 1 << 16
_CONTEXTS = 1 << 8
_SIGNERS = 1 << 4
"""Contexts, and processes, that a logprob can tell apart; float32 holds it for a few thousand policies."""
_HALF_LOADED = 0

History = tuple[tuple[int, ...], ...]
"""The leases of each batch, in order."""
_END_TOKEN = 1
_VOCABULARY = 16


@dataclass
class Truth:
    """All policies that ever were, by the digest of their history, and by a small number."""

    histories: list[History] = field(default_factory=lambda: [(), ()])
    numbers: dict[str, int] = field(default_factory=dict)
    signers: dict[str, int] = field(default_factory=dict)
    """By name of a generator's process, as spans have it: what its logprobs tell of it."""

    def number_of(self, history: History) -> int:
        """A number for the policy that was trained on this; 0 stands for weights that are none."""
        digest = digest_of(history)
        if digest not in self.numbers:
            self.numbers[digest] = len(self.histories)
            self.histories.append(history)
        return self.numbers[digest]


def digest_of(history: History) -> str:
    """Of all batches in order."""
    return hashlib.blake2b(repr(history).encode(), digest_size=12).hexdigest()


def tensors_of(history: History, number: int, *, finite: bool, size: int) -> list[tuple[str, torch.Tensor]]:
    """Two parameters; the first names the policy, the second is as large as the simulation wants weights to be."""
    seed = int(digest_of(history), 16)
    head = torch.tensor([float(number), float(len(history))], dtype=torch.float32)
    body = torch.full((size,), float(seed % 9973) if finite else float("nan"), dtype=torch.float32)
    return [("head", head), ("body", body)]


def number_in(tensors: dict[str, torch.Tensor]) -> int:
    """The number of the policy that these tensors are of."""
    return int(tensors["head"].numpy()[0])


def is_finite(tensors: dict[str, torch.Tensor]) -> bool:
    """True if all of them are numbers."""
    return all(bool(np.isfinite(tensor.numpy()).all()) for tensor in tensors.values())


def context_of(token_ids: Iterable[int], before: int = 0) -> int:
    """A checksum of tokens in a row; `before` is that of those before them."""
    return zlib.crc32(b"".join(int(token).to_bytes(4, "little") for token in token_ids), before)


def signer_of(process: Process) -> int:
    """Mark of the process that sampled, as logprobs tell it; a few others may have the same."""
    return process.number % _SIGNERS


def logprob_of(number: int, context: int, signer: int = 0) -> float:
    """The logprob of a token sampled by a policy behind a context in a process; float32 holds it as it is."""
    return -((number * _SIGNERS + signer) * _CONTEXTS + context % _CONTEXTS + 1) / _SCALE


def sampled_by(logprob: float) -> tuple[int, int]:
    """The inverse: the policy's number, and what is known of the context's checksum."""
    number, known = divmod(round(-logprob * _SCALE) - 1, _CONTEXTS)
    return number // _SIGNERS, known


def signed_by(logprob: float) -> int:
    """Mark of the process that sampled."""
    return (round(-logprob * _SCALE) - 1) // _CONTEXTS % _SIGNERS


def is_behind(context: int, known: int) -> bool:
    """True if a token may have been sampled behind a context of this checksum."""
    return context % _CONTEXTS == known


def probe_logprob(number: int, token: int, *, finite: bool) -> float:
    """Of a token of the probe, by learner and engines alike: differs a little between versions."""
    return -(1.0 + (number * 7 + token * 13) % 101 / 500.0) if finite else float("nan")


@dataclass
class EngineScript:
    """Behaviour of an engine. Its logprobs of a probe are off by some nats, to one side or the other: numerics look
    like no other version. `gaps` are pairs of a policy's number and what they are off by from it on, in order: numerics
    are of the weights, and older policies keep the ones that they had.
    """

    start_s: float = 1.0
    token_s: float = 0.05
    sequence_s: float = 0.0
    """Time that each sequence which is sampled at once adds to that of a token."""
    begin_s: float = 0.0
    """Time that a sequence which begins adds to a step, for its prompt: all that run wait for it."""
    begun_s: float = 0.0
    """Of all that have begun so far."""
    lengths: tuple[int, ...] = ()
    """Completions have one of these; one to six tokens if there are none."""
    at_once: int = 0
    """Sequences that are sampled at once, the others wait in line; 0 for any number."""
    running: int = 0
    core: str = ""
    """Name of its thread on the cores that all processes share; empty for an engine with a device of its own."""
    request_s: float = 0.0
    """Computed seconds that a completion costs in the process before an engine with such a thread."""
    load_s: float = 0.05
    score_s: float = 0.0
    """Time of the logprobs of a text, beside that of a call."""
    gaps: tuple[tuple[int, float], ...] = ()
    newest: int = 0
    """Number of the newest policy that it ever loaded."""
    hanging: bool = False
    dead: bool = False
    fails_to_load: bool = False
    loads_wrong: bool = False
    worker: "Worker | None" = None
    llm: Any = None
    loaded: Callable[[str, dict[str, torch.Tensor]], None] = lambda who, tensors: None
    """Told of all weights that come whole."""
    broken: Callable[[str, str], None] = lambda promise, what: None
    """Told of promises that the engine sees broken."""
    _waiting: list["asyncio.Future[None]"] = field(default_factory=list)
    _line: list[object] = field(default_factory=list)

    async def enter(self, count: int) -> None:
        """Returns when so many sequences more may be sampled: first come, first served."""
        turn = object()
        self._line.append(turn)
        try:
            while self.at_once and (self._line[0] is not turn or 0 < self.running > self.at_once - count):
                waiting = asyncio.get_running_loop().create_future()
                self._waiting.append(waiting)
                await waiting
        finally:
            self._line.remove(turn)
        self._run(count)
        self.begun_s += count * self.begin_s
        self.hang(self.hanging)

    def leave(self, count: int) -> None:
        """So many sequences fewer are sampled."""
        self._run(-count)
        if count and self.at_once:
            self.hang(self.hanging)

    def _run(self, more: int) -> None:
        before, self.running = self.running, self.running + more
        if self.core and bool(before) != bool(self.running):
            cores = active().part(Cores)
            (cores.hold if self.running else cores.let_go)(self.core)

    async def work(self, seconds: float) -> None:
        """Returns when the engine has sampled for so long."""
        await (active().part(Cores).computed(seconds) if self.core else asyncio.sleep(seconds))

    async def catch_up(self, since_s: float) -> float:
        """Returns when the prompts of those are computed that began since `begun_s` was this; its value then."""
        while self.begun_s > since_s:
            due_s, since_s = self.begun_s - since_s, self.begun_s
            await self.work(due_s)
        return since_s

    async def receive(self, completions: int) -> None:
        """Returns when the process before the engine has read a request."""
        if self.core:
            await active().part(Cores).compute(f"before {self.core}", completions * self.request_s)

    def length(self, most: int, chance: float) -> int:
        """Tokens of a completion."""
        return min(most, self.lengths[int(chance * len(self.lengths))] if self.lengths else 1 + int(chance * 6))

    def pause_s(self, left: list[int]) -> float:
        """Until a request's completions, of which so many tokens each are left, are two tokens longer."""
        if not self.sequence_s:
            return 2 * self.token_s
        going = [min(2, each) for each in left if each > 0]
        return sum(going) / max(1, len(going)) * (self.token_s + self.sequence_s * self.running)

    async def answer(self) -> None:
        """Returns when the engine's process has time for a call."""
        await asyncio.sleep(0.0005)
        while self.hanging:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def hang(self, hanging: bool) -> None:
        """The engine's process stands still, or goes on."""
        self.hanging = hanging
        if not hanging:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done() and not future.get_loop().is_closed():
                    future.set_result(None)


@dataclass
class EngineScripts:
    """Of all engines, by the host of their process."""

    by_host: dict[str, EngineScript] = field(default_factory=dict)

    def of(self, process: Process) -> EngineScript:
        """The script of the engine in a process."""
        return self.by_host[process.host]


class Worker:
    """The weights of one engine, and the completions that it samples."""

    def __init__(self, process: Process, script: EngineScript) -> None:
        self._process = process
        self._script = script
        self.version = ""
        self.holds: dict[str, torch.Tensor] = {}
        self._epoch: int | None = None
        self._loaded = ""
        self.half_loaded = False
        self.loading = False
        self.paused_since: float | None = None
        self._signer = signer_of(process)
        self._staged: list[tuple[BucketSpec, torch.Tensor]] = []
        self._plan: Prepare | None = None
        self._member: collective.CollectiveMember | None = None
        self._bucket_timeout_s = 10.0
        self._operation: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    # Sampling

    async def turn(self) -> None:
        """Returns when a token may be sampled."""
        await self._script.answer()
        while self.paused_since is not None:
            await self._changed.wait()

    def tell(self) -> None:
        """Wakes all who wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    def pause(self) -> None:
        """No token is sampled until `resume`."""
        if self.paused_since is None:
            self.paused_since = active().now

    def resume(self) -> None:
        """Tokens are sampled."""
        self.paused_since = None
        self.tell()

    def stamp(self, version: str) -> None:
        """Gives this version to what is sampled from now on."""
        if self._loaded and version != self._loaded:
            self._script.broken("stamps", f"{self._process.name} loaded {self._loaded}, and stamps {version}")
        self.version = version
        self.half_loaded = False

    async def sample(self, running: Any) -> AsyncIterator[list[GeneratePart]]:
        """The parts of all completions of a request, two tokens at a time."""
        random = active().random
        most = running.sampling.max_tokens
        lengths = [self._script.length(most, random.random()) for _ in range(running.n)]
        spans: list[list[VersionSpan]] = [[] for _ in lengths]
        at = [0] * len(lengths)
        contexts = [context_of(running.prompt)] * len(lengths)
        going = range(len(lengths))
        counted = running.n
        await self._script.enter(counted)
        begun_s = self._script.begun_s - counted * self._script.begin_s
        try:
            while any(at[index] < lengths[index] for index in going) or not any(lengths):
                left = [lengths[index] - at[index] for index in going]
                unfinished = sum(each > 0 for each in left)
                self._script.leave(counted - unfinished)
                counted = unfinished
                await self._script.work(self._script.pause_s(left) * (0.5 + random.random()))
                begun_s = await self._script.catch_up(begun_s)
                await self._turn_or_abort(running)
                if running.aborted:
                    yield [
                        GeneratePart(index=index, finish_reason="abort", version_spans=tuple(spans[index]))
                        for index in going if at[index] < lengths[index]
                    ]  # fmt: skip
                    return
                unfinished_ones = [index for index in going if at[index] < lengths[index]]
                yield [self._part(index, at, lengths, spans, contexts, most) for index in unfinished_ones]
        finally:
            self._script.leave(counted)

    async def _turn_or_abort(self, running: Any) -> None:
        await self._script.answer()
        while self.paused_since is not None and not running.aborted:
            await self._changed.wait()

    def _part(
        self,
        index: int,
        at: list[int],
        lengths: list[int],
        spans: list[list[VersionSpan]],
        contexts: list[int],
        most: int,
    ) -> GeneratePart:
        count = min(2, lengths[index] - at[index])
        start, end = at[index], at[index] + count
        at[index] = end
        last = spans[index][-1] if spans[index] else None
        if last is not None and last.version == self.version:
            spans[index][-1] = VersionSpan(version=self.version, start=last.start, end=end)
        else:
            spans[index].append(VersionSpan(version=self.version, start=start, end=end))
        ended = end >= lengths[index]
        random = active().random
        tokens = [2 + int(random.random() * (_VOCABULARY - 2)) for _ in range(count)]
        if ended and end < most:
            tokens[-1] = _END_TOKEN
        number = _HALF_LOADED if self.half_loaded or not self.holds else number_in(self.holds)
        logprobs = []
        for token in tokens:
            logprobs.append(logprob_of(number, contexts[index], self._signer))
            contexts[index] = context_of((token,), contexts[index])
        return GeneratePart(
            index=index,
            token_ids=tuple(tokens),
            behavior_logprobs=tuple(logprobs),
            version_spans=tuple(spans[index]),
            finish_reason=("length" if end >= most else "stop") if ended else None,
        )

    def score(self, token_ids: list[int]) -> tuple[float, ...]:
        """Logprobs of the tokens after the first."""
        if not self.holds:
            return tuple(-1.0 for _ in token_ids[1:])
        number, finite = number_in(self.holds), is_finite(self.holds)
        gap = next((nats for first, nats in reversed(self._script.gaps) if number >= first), 0.0)
        return tuple(probe_logprob(number, token, finite=finite) + gap * (-1) ** token for token in token_ids[1:])

    # Weight sync, as generator.weights.worker offers it

    def join(self, spec: str) -> None:
        """Begins to join a group."""
        group = JoinGroup.model_validate_json(spec)
        self._drop()
        self._epoch = group.epoch
        self._bucket_timeout_s = group.bucket_timeout_s
        self._begin(self._join(group))

    async def _join(self, spec: JoinGroup) -> None:
        group = active().part(collective.Collectives).groups.get(spec.port)
        network = active().part(Network)
        if group is None or not network.connected(group.owner.host, self._process.host):
            await asyncio.sleep(spec.meet_timeout_s)
            raise RuntimeError("the store of the meeting was not reached")
        await asyncio.sleep(network.delay(self._process.host, group.owner.host))
        member = collective.CollectiveMember(group, self._process)
        group.members.append(member)
        self._process.deaths.append(group.break_off)
        group.tell()
        if not await collective.wait(group, lambda: group.complete, timeout_s=spec.meet_timeout_s):
            raise RuntimeError(f"{len(group.members)} of {group.world_size - 1} members met")
        self._member = member

    def headway_stage(self, plan: str, staging: bool) -> str:
        """See generator.weights.worker."""
        prepare = Prepare.model_validate_json(plan)
        if prepare.epoch != self._epoch:
            what = f"{self._process.name} is in group {self._epoch}, and takes a step of group {prepare.epoch}"
            self._script.broken("groups of the living", what)
        if self._member is None:
            return "this worker is in no group"
        self._plan, self._staged = prepare, []
        if staging:
            self._begin(self._receive_all(self._member, prepare))
        return ""

    async def _receive_all(self, member: collective.CollectiveMember, plan: Prepare) -> None:
        for spec in plan.buckets:
            self._staged.append((spec, await self._receive(member)))

    async def _receive(self, member: collective.CollectiveMember) -> torch.Tensor:
        member.waiting = True
        member.group.tell()
        came = await collective.wait(member.group, lambda: member.bucket is not None, timeout_s=self._bucket_timeout_s)
        data, member.bucket, member.waiting = member.bucket, None, False
        if not came or data is None:
            self._member = None
            raise RuntimeError("a bucket did not come")
        member.taken += 1
        member.group.tell()
        return data

    def headway_stage_files(self, plan: str, paths: list[str]) -> str:
        """See generator.weights.worker."""
        self._plan, self._staged = Prepare.model_validate_json(plan), []
        for spec, path in zip(self._plan.buckets, paths, strict=True):
            with open(path, "rb") as file:
                self._staged.append((spec, torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)))
        self._begin(asyncio.sleep(0.01))
        return ""

    def headway_progress(self) -> tuple[bool, str]:
        """See generator.weights.worker."""
        operation = self._operation
        if operation is None:
            return True, "no operation was begun: the group was abandoned"
        if not operation.done():
            return False, ""
        error = None if operation.cancelled() else operation.exception()
        return True, "" if error is None else str(error)

    def headway_abandon(self) -> None:
        """See generator.weights.worker."""
        self._drop()
        self._plan, self._staged = None, []

    async def headway_load(self, ttl_s: float) -> str:
        """See generator.weights.worker."""
        plan = self._plan
        if plan is None:
            return _report(error="there is nothing to load: stage a plan first")
        ends_at = active().now + ttl_s
        self.loading = True
        try:
            loaded = await self._load(plan, ends_at=ends_at)
        except RuntimeError as error:
            self.loading = False
            self._drop()
            self._plan, self._staged = None, []
            return _report(error=str(error), unloaded=self.half_loaded)
        self._script.loaded(self._process.host, loaded)
        self._script.newest = max(self._script.newest, number_in(loaded))
        self.loading, self._loaded = False, plan.version
        if not self._script.loads_wrong:
            self.holds = loaded
        self._plan, self._staged = None, []
        return _report(fingerprint=self.headway_fingerprint(), load_s=self._script.load_s)

    async def _load(self, plan: Prepare, *, ends_at: float) -> dict[str, torch.Tensor]:
        staged = list(self._staged)
        member = self._member
        if not staged:
            if member is None:
                raise RuntimeError("this worker is in no group")
            staged.append((plan.buckets[0], await self._receive(member)))
        self.half_loaded = True
        await asyncio.sleep(self._script.load_s)
        for spec in plan.buckets[len(staged) :]:
            if active().now > ends_at or member is None:
                raise RuntimeError("the pause outlived its time to live")
            staged.append((spec, await self._receive(member)))
        if self._script.fails_to_load:
            raise RuntimeError("the load failed midway")
        return {name: tensor for spec, data in staged for name, tensor in _tensors(spec, data)}

    def headway_begin_fingerprint(self) -> None:
        """See generator.weights.worker."""
        self._begin(asyncio.sleep(0.01))

    def headway_fingerprint(self) -> str:
        """See generator.weights.worker."""
        digest = xxhash.xxh3_64()
        for tensor in self.holds.values():
            digest.update(tensor.numpy().tobytes())
        return str(digest.hexdigest())

    def _begin(self, work: Any) -> None:
        operation = self._operation = asyncio.ensure_future(work)
        operation.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _drop(self) -> None:
        if self._member is not None:
            self._member.group.break_off()
        self._member = None
        if self._operation is not None:
            self._operation.cancel()
        self._operation = None


def _report(**told: object) -> str:
    from generator.weights.plan import LoadReport

    known = {each.name for each in fields(LoadReport)}
    return LoadReport(**{name: value for name, value in told.items() if name in known}).to_json()  # type: ignore[arg-type]


def _tensors(spec: BucketSpec, data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if xxhash.xxh3_64_hexdigest(data.numpy().data) != spec.xxh3:
        raise RuntimeError("a bucket's hash differs")
    found = []
    for tensor in spec.tensors:
        count = int(torch.Size(tensor.shape).numel())
        flat = data[tensor.offset : tensor.offset + 4 * count].view(torch.float32)
        found.append((tensor.name, flat.view(tensor.shape).clone()))
    return found
