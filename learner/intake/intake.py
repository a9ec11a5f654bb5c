"""The intake: leases out, groups in, batches to the trainer, while training goes on.

    env_service ──Finished──▶ admissible ─▶ journal ─▶ ledger.accept ─▶ buffer ──take()──▶ trainer thread
    env_service ◀─Granted──── _pump() ◀─ after every group, batch, publish, hello and tick

Loops, and what each waits for: `receive` for a message of an env_service; `tick` for the clock, to expire leases and
retry those that failed. `take` waits for `_stirred`, which every arrival sets. All run in one event loop, which owns
the ledger; the trainer's calls come from another thread, through `asyncio.run_coroutine_threadsafe`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from learner.history.journal import Journal
from learner.intake.admission import GroupRules, admissible, is_uniform
from learner.intake.evaluation import EvaluationResult, Evaluator
from learner.intake.failures import DeadLetters, RunFailed
from learner.intake.granting import Granting, LeaseTerms
from learner.intake.holders import Holder, Holders
from learner.ledger import (
    AttemptId,
    Batch,
    Books,
    EndedAttempt,
    FailureKind,
    FailureResult,
    Ledger,
    LedgerSnapshot,
    Verdict,
    Waiting,
)
from learner.weights.fleet import Fleet
from protocol.messages import (
    Acknowledged,
    Cancelled,
    EnvironmentInfo,
    Failed,
    Finished,
    Goodbye,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Refused,
    RunningLease,
    Welcome,
)
from protocol.messages import Fleet as FleetMessage
from protocol.trajectories import TrajectoryGroup
from protocol.versions import PolicyVersion
from services.sockets import RouterSocket
from services.waiting import Waiting as Waits

log = logging.getLogger(__name__)

_MISSED_HEARTBEATS = 5


@dataclass(frozen=True)
class IntakeOptions:
    """`environment` may be left out where only one is offered; the fingerprints are the learner's own."""

    incarnation: int
    environment: str | None
    heartbeat_every_s: float
    lease_timeout_s: float
    tokenizer: str
    chat_template: str
    rules: GroupRules


@dataclass(frozen=True)
class TakenBatch:
    """One step's groups in training order, and each group's lag."""

    version: int
    groups: tuple[TrajectoryGroup, ...]
    lags: tuple[int, ...]


class Intake:
    """Owns the ledger, the buffer of groups and the conversations with env_services."""

    def __init__(
        self,
        *,
        socket: RouterSocket,
        ledger: Ledger,
        journal: Journal,
        fleet: Fleet,
        evaluator: Evaluator,
        terms: LeaseTerms,
        dead_letters: DeadLetters,
        waits: Waits,
        options: IntakeOptions,
        refused: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._holders = Holders(socket)
        self._ledger = ledger
        self._journal = journal
        self._fleet = fleet
        self._evaluator = evaluator
        self._waits = waits
        self._options = options
        self._refused = refused
        self._clock = clock
        self._buffer: dict[int, TrajectoryGroup] = {}
        self._granting = Granting(ledger=ledger, evaluator=evaluator, terms=terms, clock=clock)
        self._dead_letters = dead_letters
        self._stirred = asyncio.Event()
        self._failure: RunFailed | None = None
        self.left_out: Counter[str] = Counter()
        """Groups and attempts that came to nothing, by reason."""

    # What the trainer calls, through the event loop

    async def take(self) -> TakenBatch:
        """The next batch, once there is one; it is in the journal, on disk, before it is returned. Raises RunFailed."""
        began = self._clock()
        with self._waits.wait("groups", quiet_s=10.0, blocks_readiness=False) as wait:
            while not isinstance(decision := self._decide(), Batch):
                wait.whom = _whom(decision)
                await self._stirred.wait()
        return await self._taken(decision, began=began)

    def _decide(self) -> Batch | Waiting:
        self._stirred.clear()
        if self._failure is not None:
            raise self._failure
        return self._ledger.take(now=self._clock())

    async def _taken(self, batch: Batch, *, began: float) -> TakenBatch:
        self._granting.batch_taken(asked_at=began)
        self._forget(batch.dropped, why="too_old")
        groups = tuple(self._buffer.pop(lease_id) for lease_id in batch.lease_ids)
        await asyncio.to_thread(self._journal.append_batch, version=batch.version, lease_ids=batch.lease_ids)
        await self._holders.cancel(batch.dropped)
        await self._pump()
        return TakenBatch(version=batch.version, groups=groups, lags=batch.lags)

    async def trained(self, version: int) -> None:
        """The learner holds `version` now."""
        self._ledger.trained(version)
        await self._pump()

    async def evaluate(self, *, tasks: int, version: int) -> "asyncio.Future[EvaluationResult] | None":
        """Starts an evaluation on at most `tasks` of the held-out tasks; None if the environment has none."""
        with self._waits.wait("an env_service", quiet_s=2.0):
            while not self._holders:
                self._stirred.clear()
                await self._stirred.wait()
        offered = max(self._environment_of(holder).evaluation_tasks for holder in self._holders)
        if not offered:
            return None
        future = self._evaluator.start(tasks=min(tasks, offered), version=version)
        await self._pump()
        return future

    def env_services(self) -> tuple[Holder, ...]:
        """Those that said hello and are still there."""
        return tuple(self._holders)

    def books(self) -> Books:
        """The counts of leases and attempts so far."""
        return self._ledger.books()

    async def ledger_snapshot(self) -> LedgerSnapshot:
        """The ledger as a checkpoint holds it."""
        return self._ledger.snapshot()

    def readmit(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Takes back groups that the journal holds and that no batch has used; those too old are left out."""
        for group in groups:
            oldest_version = group.oldest_version
            assert oldest_version is not None, "the journal holds admissible groups only"
            answer = self._ledger.readmit(lease_id=group.lease_id, oldest_version=oldest_version, size=_tokens(group))
            if answer.verdict is Verdict.ACCEPTED:
                self._buffer[group.lease_id] = group

    async def fleet_changed(self) -> None:
        """Somebody serves another version than before, came, or left."""
        self._ledger.served_changed(self._fleet.served)
        await self._holders.broadcast(FleetMessage(generators=tuple(self._fleet.serving())))
        await self._pump()

    # Loops

    async def receive(self) -> None:
        """Takes messages until cancelled."""
        while True:
            peer, message = await self._socket.receive()
            await self._handle(peer, message)

    async def tick(self) -> None:
        """Expires what has gone silent and grants again what waited for its backoff, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            now = self._clock()
            limit_s = max(_MISSED_HEARTBEATS * self._options.heartbeat_every_s, self._options.lease_timeout_s)
            for holder in self._holders:
                if now - holder.last_seen > limit_s:
                    log.warning("env_service %s is silent for %.0f s: its leases go to others", holder.name, limit_s)
                    await self._part(holder)
            expired = self._ledger.expire(now=now)
            self._forget(expired, why="expired")
            await self._holders.cancel(expired)
            self._evaluator.expire(now=now)
            self._stirred.set()
            await self._pump()

    # Messages

    async def _handle(self, peer: str, message: Message) -> None:
        holder = self._holders.at(peer)
        if isinstance(message, Hello):
            await self._on_hello(peer, message)
        elif holder is None:
            await self._refuse(peer, "unknown_peer", f"a {message.kind} before a hello: say hello first")
        else:
            holder.last_seen = self._clock()
            await self._on_message(holder, message)

    async def _on_message(self, holder: Holder, message: Message) -> None:
        match message:
            case Heartbeat():
                await self._on_heartbeat(holder, message)
            case Finished():
                await self._on_finished(holder, message.group)
            case Failed():
                await self._on_failed(holder, message)
            case Goodbye():
                log.info("env_service %s leaves: %s", holder.name, message.reason)
                await self._part(holder)
            case _:
                text = f"a {message.kind} is for env_services, the learner does not take it"
                await self._refuse(holder.peer, "unexpected", text)

    async def _refuse(self, peer: str, reason: str, message: str) -> None:
        self._refused(reason)
        await self._holders.answer(peer, Refused(reason=reason, message=message))

    async def _on_hello(self, peer: str, hello: Hello) -> None:
        candidate = Holder(peer=peer, hello=hello, last_seen=self._clock())
        fault = self._fault_of(candidate)
        if fault is not None:
            log.warning("env_service %s is refused: %s", hello.env_id, fault)
            await self._refuse(peer, "hello", fault)
            return
        holder, is_new = self._holders.welcome(peer=peer, hello=hello, now=self._clock())
        info = self._environment_of(holder)
        if is_new:
            log.info("env_service %s offers %s, %d groups at once", holder.name, info.name, hello.capacity)
        self._granting.know_tasks(info.train_tasks)
        options = self._options
        await self._holders.send(
            holder, Welcome(incarnation=options.incarnation, heartbeat_every_s=options.heartbeat_every_s)
        )
        await self._holders.send(holder, FleetMessage(generators=tuple(self._fleet.serving())))
        self._stirred.set()
        await self._pump()

    def _fault_of(self, holder: Holder) -> str | None:
        options, hello = self._options, holder.hello
        for what, ours, theirs in (
            ("tokenizer", options.tokenizer, hello.tokenizer),
            ("chat template", options.chat_template, hello.chat_template),
        ):
            if ours != theirs:
                return f"its {what} has fingerprint {theirs}, the learner's {ours}: use the same model directory"
        if holder.environment(options.environment) is None:
            offered = ", ".join(info.name for info in hello.environments)
            wanted = options.environment or "exactly one environment (rollouts.environment is not set)"
            return f"the learner wants {wanted}, env_service {hello.env_id} offers {offered}"
        tasks = self._environment_of(holder).train_tasks
        order = self._granting.order
        if order is not None and order.count != tasks:
            return (
                f"its environment has {tasks} training tasks, that of the first env_service of this run "
                f"{order.count}: give all of them the same data, or restart the learner"
            )
        return None

    async def _on_heartbeat(self, holder: Holder, heartbeat: Heartbeat) -> None:
        running = {
            (lease.lease_id, lease.attempt): _number(lease.oldest_version)
            for lease in heartbeat.running
            if lease.purpose == "train"
        }
        now = self._clock()
        unwanted = self._ledger.heartbeat(now=now, holder=holder.name, running=running)
        holder.running -= set(unwanted)
        evaluated = {lease.lease_id: lease for lease in heartbeat.running if lease.purpose == "evaluate"}
        leases = [RunningLease(lease_id=lease_id, attempt=number, purpose="train") for lease_id, number in unwanted]
        leases += [
            evaluated[lease_id]
            for lease_id in self._evaluator.heartbeat(now=now, holder=holder.name, lease_ids=evaluated)
        ]
        if leases:
            await self._holders.send(holder, Cancelled(leases=tuple(leases)))

    async def _on_finished(self, holder: Holder, group: TrajectoryGroup) -> None:
        if group.purpose == "evaluate":
            self._evaluator.finished(group)
        else:
            kept = admissible(group, rules=self._options.rules, newest_version=self._ledger.version)
            if isinstance(kept, Failed):
                self._fail(kept)
            else:
                await self._accept(kept)
        await self._acknowledge(holder, group.lease_id, group.attempt, group)

    async def _accept(self, group: TrajectoryGroup) -> None:
        oldest_version = group.oldest_version
        assert oldest_version is not None, "an admissible group has sampled tokens"
        lease_id, attempt = group.lease_id, group.attempt
        verdict = self._ledger.would_accept(lease_id=lease_id, attempt=attempt, oldest_version=oldest_version)
        if verdict is Verdict.ACCEPTED:
            self._journal.append_group(group)
            if self._options.rules.drop_uniform_groups and is_uniform(group):
                self._journal.append_filtered(lease_id)
                await self._holders.cancel(self._ledger.filter(lease_id=lease_id, attempt=attempt))
                self.left_out["uniform"] += 1
                return
            self._buffer[lease_id] = group
        answer = self._ledger.accept(
            lease_id=lease_id, attempt=attempt, oldest_version=oldest_version, size=_tokens(group)
        )
        if answer.verdict is not Verdict.ACCEPTED:
            self.left_out[answer.verdict.value] += 1
        await self._holders.cancel(answer.cancelled)

    async def _on_failed(self, holder: Holder, failed: Failed) -> None:
        if failed.purpose == "evaluate":
            self._evaluator.failed(failed.lease_id)
        else:
            self._fail(failed)
        await self._acknowledge(holder, failed.lease_id, failed.attempt, failed)

    async def _acknowledge(
        self, holder: Holder, lease_id: int, attempt: int, outcome: TrajectoryGroup | Failed
    ) -> None:
        if outcome.purpose == "train":
            holder.running.discard(AttemptId(lease_id, attempt))
        message = Acknowledged(lease_id=lease_id, attempt=attempt, purpose=outcome.purpose)
        await self._holders.send(holder, message)
        self._stirred.set()
        await self._pump()

    def _fail(self, failed: Failed) -> None:
        kind: FailureKind = "data" if failed.data_fault else "infrastructure"
        result = self._ledger.fail(
            now=self._clock(),
            lease_id=failed.lease_id,
            attempt=failed.attempt,
            kind=kind,
            reason=failed.reason,
        )
        self.left_out[f"failed_{kind}"] += 1
        if result is not FailureResult.DEAD_LETTERED:
            return
        log.warning("lease %d is given up: %s", failed.lease_id, failed.reason)
        assert self._granting.order is not None, "nothing was granted yet"
        self._dead_letters.append(failed, task_index=self._granting.order.task_index(failed.lease_id))
        self._failure = self._dead_letters.verdict(self._ledger)
        self._stirred.set()

    async def _part(self, holder: Holder) -> None:
        self._holders.part(holder)
        self._forget(self._ledger.holder_gone(holder.name), why="holder_gone")
        self._evaluator.holder_gone(holder.name)
        await self._pump()

    async def _pump(self) -> None:
        """Grants whatever may be granted, to whoever has room."""
        for holder in self._holders:
            if not self._holders.has(holder):
                continue  # it left, or moved, while another one's grant was sent
            leases = self._granting.leases_for(holder, environment=self._environment_of(holder).name)
            if leases:
                await self._holders.send(holder, Granted(leases=tuple(leases)))

    def _forget(self, ended: Iterable[EndedAttempt], *, why: str) -> None:
        ended = tuple(ended)
        self._holders.release(AttemptId(attempt.lease_id, attempt.attempt) for attempt in ended)
        for attempt in ended:
            self.left_out[why] += 1
            if attempt.holder is None:
                self._buffer.pop(attempt.lease_id, None)

    def _environment_of(self, holder: Holder) -> EnvironmentInfo:
        info = holder.environment(self._options.environment)
        assert info is not None, "checked at hello"
        return info


def _tokens(group: TrajectoryGroup) -> int:
    return sum(trajectory.token_ids.shape[0] for trajectory in group.trajectories)


def _number(version: str | None) -> int | None:
    return None if version is None else PolicyVersion.parse(version).number


def _whom(waiting: Waiting) -> str:
    if waiting.stragglers:
        slowest = waiting.stragglers[0]
        return f"lease {slowest.lease_id} at env_service {slowest.holder}, which the next step would make too old"
    return f"groups: {waiting.have} of {waiting.need} are there"
