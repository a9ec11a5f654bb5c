"""Scripted clients of the Tinker API: each is a tenant with a training loop of its own, as the SDK would send it.

Requests go on as the SDK's do: a broken connection, 408, 409, 429 and 5xx are tried again, a future is asked for
without an end, a sample that is lost (410) is asked for anew. Each answer is held against the twin's. What a client
knows outlives its process: a new one goes on with the same session, sends again what it is not sure of, and asks for
the rest.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from learner.training.client_operations import AdapterShape
from protocol.tinker.messages import MESSAGES
from services.process import Stop
from simulation.actors.tenant_generator import BASE_MARK, token_of
from simulation.actors.tenant_trainer import BASE
from simulation.actors.tenant_twin import JSON, PROTOBUF, PlannedOperation, SavedMark, TwinModel
from simulation.world.clock import active
from simulation.world.http import Connector, StubClientSession

_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
_LOST, _UNKNOWN = 410, 404
_PATIENCE_S = 45.0
_HEARTBEAT_S = 10.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 15.0
_ASK_AGAIN = 0.2
"""Share of the answers that are asked for once more, and of the operations that are sent once more."""


@dataclass(frozen=True)
class TenantHabits:
    """Traits of a client. `impatience`: share of its requests that it breaks off early. `depth`: operations that it has
    under way before it waits. `polls`: it is told of samples by one poll for all. `odd`: share of what it does that is
    wrong, and `nosy` of what it asks of others. `loads`: it loads and overwrites checkpoints; `rewrites`: share of its
    rounds that end with something at a path which has other weights, or any, only later.
    """

    moves: int = 8
    models: int = 1
    think_s: float = 0.5
    impatience: float = 0.0
    depth: int = 3
    polls: bool = True
    odd: float = 0.1
    nosy: float = 0.1
    samples: float = 0.4
    loads: bool = True
    rewrites: float = 0.0


@dataclass(frozen=True)
class TenantWorld:
    """The part of the world that clients share. `others` names ids of tenants other than the named one; `broken` is
    told which promise was not kept, and how; `seen` that an answer was; `excused`: a server's error may be one of its
    disk.
    """

    learner: str
    others: Callable[[str], list[str]]
    broken: Callable[[str, str], None]
    seen: Callable[[], None]
    excused: Callable[[], bool]


@dataclass
class AskedSample:
    """A sample: from which saved weights, or later ones of an inflight target; None is the base model."""

    session: str
    model: TwinModel | None
    mark: SavedMark | None
    kind: str
    prompt: tuple[int, ...]
    tokens: int
    number: int
    done: bool = False


@dataclass
class TenantNotes:
    """All that a client knows; it outlives the client's process."""

    name: str
    habits: TenantHabits
    dice: random.Random
    session_id: str = ""
    models: list[TwinModel] = field(default_factory=list)
    asked: list[AskedSample] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    sampled: dict[str, int] = field(default_factory=dict)
    """By sampling session: the number of its last sample."""
    seeds: dict[int, int] = field(default_factory=dict)
    """By model: the seed that it was asked for with."""
    moved: int = 0
    made: int = 0
    finished: bool = False

    @property
    def key(self) -> str:
        """The key that it shows."""
        return f"tml-{self.name}"

    @property
    def operations(self) -> Iterator[PlannedOperation]:
        """Operations of all its models."""
        return (operation for model in self.models for operation in model.operations)

    @property
    def steps(self) -> int:
        """Steps whose answers it has seen."""
        return sum(operation.done and operation.kind == "optim_step" for operation in self.operations)

    def waiting(self) -> list[str]:
        """Names of what is not answered yet: operations, and sampling sessions of samples."""
        samples = [each.session for each in self.asked if not each.done]
        return [each.request_id for each in self.operations if not each.done] + samples

    def ids(self) -> list[str]:
        """Names that are of no use to others."""
        return [self.session_id, *(operation.request_id for operation in self.operations)] if self.session_id else []


class LostSample(RuntimeError):
    """A restart has lost a sample: it is to be asked for anew."""


class StubTenantClient:
    """A life of a client."""

    def __init__(self, notes: TenantNotes, world: TenantWorld) -> None:
        self._notes, self._world, self._dice = notes, world, notes.dice
        self._under_way: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, dict[str, asyncio.Future[str]]] = {}
        """By sampling session: samples of which its poll has to tell."""
        self._ended: dict[str, set[str]] = {}
        """By sampling session: samples of which its poll has told."""
        self._polls: dict[str, asyncio.Task[None]] = {}

    async def serve(self, stop: Stop) -> None:
        """The life of its process."""
        headers = {"X-API-Key": self._notes.key}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._http = StubClientSession(connector=Connector(limit=0), timeout=timeout, headers=headers)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if not self._notes.session_id:
                made = await self._answered("create_session", {"tags": [], "sdk_version": "0.38"})
                self._notes.session_id = made["session_id"]
            loops = [tasks.create_task(self._heartbeats()), tasks.create_task(self._live())]
            await stop.wait()
            for task in [*loops, *self._polls.values(), *self._under_way]:
                task.cancel()

    # What it does

    async def _live(self) -> None:
        notes = self._notes
        for operation in [each for each in notes.operations if not each.done]:
            self._begin(self._see(operation))
        for sample in [each for each in notes.asked if not each.done]:
            self._begin(self._see_sample(sample))
        while notes.moved < notes.habits.moves:
            notes.moved += 1
            await self._move()
            while len(self._under_way) > notes.habits.depth:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(notes.habits.think_s * 2 * self._dice.random())
        for model in notes.models:
            self._begin(self._see(model.forward_backward([[1, 2, 3]], [1.0], forward_only=True)))
        while self._under_way:
            await asyncio.wait(self._under_way)
        notes.finished = True
        self._world.seen()

    async def _move(self) -> None:
        notes, dice = self._notes, self._dice
        if len(notes.models) < notes.habits.models:
            await self._make_model()
            return
        model = dice.choice(notes.models)
        if dice.random() < notes.habits.nosy:
            self._begin(self._pry())
        self._send_together(self._passes(model))
        if dice.random() < 0.8:
            self._send_together([model.step(learning_rate=dice.choice((0.01, 0.1)), beta1=dice.choice((0.5, 0.9)))])
        if notes.habits.rewrites and dice.random() < notes.habits.rewrites:
            self._send_together(self._rewritten(model))
            return
        draw = dice.random()
        if draw < notes.habits.samples:
            await self._sample(model)
        elif draw < notes.habits.samples + 0.3:
            self._send_together(self._checkpoints(model))

    def _passes(self, model: TwinModel) -> list[PlannedOperation]:
        """A call in chunks, at times with one that fails."""
        dice, passes = self._dice, []
        for _ in range(dice.choice((1, 1, 2, 3))):
            rows = [[dice.randrange(200) for _ in range(dice.randint(1, 5))] for _ in range(dice.choice((1, 2)))]
            trouble = dice.choice(("nan", "poison")) if dice.random() < self._notes.habits.odd else ""
            weights = [dice.choice((1.0, -0.5)) for _ in rows]
            passes.append(model.forward_backward(rows, weights, forward_only=dice.random() < 0.2, trouble=trouble))
        return passes

    def _checkpoints(self, model: TwinModel) -> list[PlannedOperation]:
        """A save, or a load of what is known to have been saved; at times one that has to fail."""
        dice, notes = self._dice, self._notes
        notes.made += 1
        new = f"s{notes.made}"
        if not notes.habits.loads:
            return [model.save(new)]
        saved = [each for twin in notes.models for each in twin.states.values() if each.by.done and not each.by.lost]
        draw = dice.random()
        if draw < notes.habits.odd:
            return [model.load(f"tinker://{model.model_id}/weights/{new}"), model.save(new)]
        free = sorted(name for name, each in model.states.items() if each.path not in self._awaited_elsewhere(model))
        if draw < 2 * notes.habits.odd and free:
            name = dice.choice(free)
            return [model.save(name), model.save(name, overwrite=True)]
        if draw < 0.6 and saved:
            return [model.load(dice.choice(saved), optimizer=dice.random() < 0.7)]
        return [model.save(new)]

    def _rewritten(self, model: TwinModel) -> list[PlannedOperation]:
        """A load of what is overwritten after it, or of what is not there yet: a replay would find something else."""
        notes = self._notes
        awaited = self._awaited_elsewhere(model)
        known = (name for name, each in model.states.items() if each.by.done and not each.by.lost)
        saved = [name for name in known if model.states[name].path not in awaited]
        if not saved or self._dice.random() < 0.3:
            notes.made += 1
            name = f"s{notes.made}"
            return [model.load(f"tinker://{model.model_id}/weights/{name}"), model.save(name)]
        name = self._dice.choice(saved)
        load = model.load(model.states[name])
        step = model.step(learning_rate=0.1, beta1=0.5)
        return [load, *self._passes(model), step, model.save(name, overwrite=True)]

    def _awaited_elsewhere(self, model: TwinModel) -> set[str]:
        """Paths that other models are about to load. What is written there meanwhile may come first: no order holds
        between operations of two models.
        """
        others = (each for twin in self._notes.models if twin is not model for each in twin.operations)
        return {each.body["path"] for each in others if isinstance(each.body, dict) and each.loads and not each.done}

    async def _make_model(self) -> None:
        notes, dice = self._notes, self._dice
        number = len(notes.models)
        model_id = f"{notes.session_id}:train:{number}"
        saved = [each for twin in notes.models for each in twin.states.values() if each.by.done and not each.by.lost]
        if saved and number not in notes.seeds and dice.random() < 0.5:
            source = dice.choice(saved)
            shape = notes.models[0].adapter.shape
            notes.models.append(TwinModel.loaded(model_id, notes.session_id, shape, source))
            await self._see(notes.models[-1].operations[0])
            return
        seed = notes.seeds.setdefault(number, dice.randrange(1000))
        body = {"session_id": notes.session_id, "model_seq_id": number, "base_model": BASE}
        accepted = await self._answered("create_model", {**body, "lora_config": {"rank": 2, "seed": seed}})
        _, payload = await self._retrieved(accepted["request_id"])
        if json.loads(payload).get("model_id") != model_id:
            self._world.broken("answers", f"{payload!r} for the model {model_id}")
        if number == len(notes.models):
            notes.models.append(TwinModel.new(model_id, AdapterShape(rank=2, seed=seed)))

    def _send_together(self, operations: list[PlannedOperation]) -> None:
        """The first one last, as the SDK does."""
        for operation in reversed(operations):
            self._begin(self._see(operation))

    def _begin(self, work: Any) -> None:
        task = self._tasks.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    # Operations

    async def _see(self, operation: PlannedOperation) -> None:
        """Sends it, waits for its answer, and looks at that: at times twice."""
        await self._accepted(operation)
        content_type, payload = await self._retrieved(operation.request_id)
        self._judge(operation, content_type, payload)
        operation.done = True
        self._world.seen()
        if self._dice.random() < _ASK_AGAIN and not operation.lost:
            await asyncio.sleep(self._dice.random() * 3)
            if self._dice.random() < 0.5:
                await self._accepted(operation)
            self._judge(operation, *await self._retrieved(operation.request_id))

    async def _accepted(self, operation: PlannedOperation) -> None:
        twice = self._dice.random() < _ASK_AGAIN
        names = await asyncio.gather(*(self._submitted(operation) for _ in range(1 + twice)))
        if set(names) != {operation.request_id}:
            self._world.broken("answers", f"operation {operation.request_id} is called {names}")

    async def _submitted(self, operation: PlannedOperation) -> str:
        return str(json.loads(await self._until_taken(operation.kind, operation.sent))["request_id"])

    def _judge(self, operation: PlannedOperation, content_type: str, payload: bytes) -> None:
        if content_type == JSON and not operation.expected.error and self._world.excused():
            given = json.loads(payload)
            if given.get("category") == "server" and operation.kind.startswith("save"):
                operation.lost = True
                return
        fault = operation.expected.fault_of(content_type, payload)
        if fault:
            self._world.broken("once, and in order", f"{operation.kind} {operation.request_id} is answered {fault}")

    # Samples

    async def _sample(self, model: TwinModel) -> None:
        """From the base model, or from weights that are saved for it."""
        dice, notes = self._dice, self._notes
        prompt = tuple(dice.randrange(200) for _ in range(dice.randint(1, 4)))
        if dice.random() < 0.2:
            if not notes.bases:
                body = {"session_id": notes.session_id, "sampling_session_seq_id": 0, "base_model": BASE}
                notes.bases.append((await self._answered("create_sampling_session", body))["sampling_session_id"])
            self._ask(AskedSample(notes.bases[0], None, None, "base", prompt, dice.randint(1, 8), dice.choice((1, 2))))
            return
        kind = dice.choice(("inflight", "snapshot"))
        notes.made += 1
        operation = model.sampler(kind, number=notes.made)
        mark = model.marks[kind][-1]
        wanted = dice.randint(1, 12), dice.choice((1, 2))
        self._begin(self._sample_from(operation, model, mark, kind, prompt, wanted))

    async def _sample_from(
        self,
        operation: PlannedOperation,
        model: TwinModel,
        mark: SavedMark,
        kind: str,
        prompt: tuple[int, ...],
        wanted: tuple[int, int],
    ) -> None:
        """A client that dies meanwhile has saved the weights and asks for no sample."""
        await self._see(operation)
        _, payload = await self._retrieved(operation.request_id)
        session = json.loads(payload).get("sampling_session_id")
        if session is not None:
            self._ask(AskedSample(session, model, mark, kind, prompt, *wanted))

    def _ask(self, sample: AskedSample) -> None:
        self._notes.asked.append(sample)
        self._begin(self._see_sample(sample))

    async def _see_sample(self, sample: AskedSample) -> None:
        while True:
            seq_id = self._notes.sampled[sample.session] = self._notes.sampled.get(sample.session, 0) + 1
            body = {
                "sampling_session_id": sample.session, "seq_id": seq_id, "num_samples": sample.number,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(sample.prompt)}]},
                "sampling_params": {"max_tokens": sample.tokens, "stop": []},
            }  # fmt: skip
            name = str((await self._answered("asample", body))["request_id"])
            try:
                if self._notes.habits.polls:
                    await self._told(sample.session, name)
                content_type, payload = await self._retrieved(name)
            except LostSample:
                continue
            if content_type == PROTOBUF or not self._was_given_up(payload):
                break
        self._judge_sample(sample, content_type, payload)
        sample.done = True
        self._world.seen()

    def _was_given_up(self, payload: bytes) -> bool:
        """No generator has answered for long: the SDK's caller would try again."""
        return bool(json.loads(payload).get("category") == "server")

    def _judge_sample(self, sample: AskedSample, content_type: str, payload: bytes) -> None:
        if content_type != PROTOBUF:
            self._world.broken("samples", f"a sample of {sample.session} is answered {payload!r}")
            return
        for number, sequence in enumerate(MESSAGES["SampleResponse"].FromString(payload).sequences):
            tokens = np.frombuffer(sequence.tokens, "<i4").tolist()
            versions = np.frombuffer(sequence.versions, "<i8").tolist()
            if len(tokens) != sample.tokens:
                self._world.broken("samples", f"{len(tokens)} tokens, {sample.tokens} were asked for")
            oldest = -1
            for place, (token, version) in enumerate(zip(tokens, versions, strict=True)):
                found = [
                    mark for mark in _candidates(sample)
                    if token_of(mark.chain, sample.prompt, place=place, number=number)[0] == token
                    and mark.steps == version and mark.seq_id >= oldest
                ]  # fmt: skip
                if not found:
                    what = f"token {place} of {sample.session}, {sample.kind}, stamped {version}, is not of its weights"
                    self._world.broken("samples", what)
                    return
                oldest = found[0].seq_id

    async def _told(self, session: str, name: str) -> None:
        """Waits until the poll of its sampling session tells of a sample."""
        if name in self._ended.setdefault(session, set()):
            return
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, {})[name] = future
        if session not in self._polls:
            self._polls[session] = self._tasks.create_task(self._poll(session))
        await future

    async def _poll(self, session: str) -> None:
        cursor = 0
        while True:
            body = {"target": {"sampling_session_id": session, "cloned_sampler_id": 0}, "prev_cursor": cursor}
            told = await self._answered("retrieve_futures", body)
            cursor = told["cursor"]
            for completion in told["completions"]:
                self._ended[session].add(completion["request_id"])
                future = self._waiting[session].pop(completion["request_id"], None)
                if future is not None and not future.done():
                    future.set_result(completion["state"])
            if not told["completions"]:
                await asyncio.sleep(0.1)

    # Others' things

    async def _pry(self) -> None:
        """Nothing of another tenant is there for it."""
        names = self._world.others(self._notes.name)
        if not names:
            return
        name = self._dice.choice(names)
        route, body = self._dice.choice(
            (
                ("retrieve_future", {"request_id": name}),
                ("get_info", {"model_id": name.rpartition(":")[0] or name}),
                ("session_heartbeat", {"session_id": name.partition(":")[0]}),
                ("optim_step", {"model_id": name.rpartition(":")[0], "seq_id": 1, "adam_params": {}}),
            )
        )
        answer = await self._tried(route, json.dumps(body).encode(), JSON)
        if answer is not None and answer[0] not in (*_AGAIN, _UNKNOWN):
            self._world.broken("tenants apart", f"{self._notes.name} asks {route} of {name}, and gets {answer[0]}")

    # Requests

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._tried("session_heartbeat", json.dumps({"session_id": self._notes.session_id}).encode(), JSON)

    async def _answered(self, route: str, body: dict[str, Any]) -> Any:
        encoded = json.dumps(body).encode()
        return json.loads(await self._until_taken(route, lambda: (encoded, JSON)))

    async def _until_taken(self, route: str, sent: Callable[[], tuple[bytes, str]]) -> bytes:
        pause_s = _FIRST_PAUSE_S
        while True:
            answer = await self._tried(route, *sent())
            if answer is not None and answer[0] == 200:
                return answer[2]
            if answer is not None and answer[0] not in _AGAIN:
                await self._refused(route, answer)
            await asyncio.sleep(pause_s * (0.5 + self._dice.random()))
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)

    async def _refused(self, route: str, answer: tuple[int, str, bytes]) -> None:
        """Nothing that was right is refused."""
        self._world.broken("answers", f"{self._notes.name}'s {route} gets {answer[0]} {answer[2][:200]!r}")
        await asyncio.Event().wait()

    async def _retrieved(self, request_id: str) -> tuple[str, bytes]:
        """Raises LostSample."""
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            answer = await self._tried("retrieve_future", body, JSON)
            if answer is None or answer[0] in _AGAIN:
                await asyncio.sleep(0.2 + self._dice.random())
                continue
            status, content_type, payload = answer
            if status == _LOST and ":sample:" in request_id:
                raise LostSample(request_id)
            if status != 200:
                self._world.broken("a future is answered", f"{request_id} gets {status} {payload[:200]!r}")
                await asyncio.Event().wait()
            return content_type, payload

    async def _tried(self, route: str, body: bytes, content_type: str) -> tuple[int, str, bytes] | None:
        """Status, content type and body of an answer; None if there is none."""
        hasty = self._dice.random() < self._notes.habits.impatience
        patience_s = active().random.uniform(0.002, 0.3) if hasty else _PATIENCE_S
        url = f"{self._world.learner}/api/v1/{route}"
        try:
            async with (
                asyncio.timeout(patience_s),
                self._http.request("POST", url, data=body, headers={"Content-Type": content_type}) as answer,
            ):
                payload = b"".join([chunk async for chunk in answer.iter_any()])
                return answer.status, answer.content_type, payload
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def _candidates(sample: AskedSample) -> list[SavedMark]:
    """Weights that may sample: those of a snapshot; of an inflight target those and what was saved later."""
    if sample.model is None or sample.mark is None:
        return [SavedMark(0, 0, BASE_MARK)]
    if sample.kind == "snapshot":
        return [sample.mark]
    return [mark for mark in sample.model.marks["inflight"] if mark.seq_id >= sample.mark.seq_id]
