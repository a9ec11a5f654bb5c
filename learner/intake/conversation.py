"""What is said between the learner and its env_services: each message of theirs, and the answer to it.

    Hello ─────▶ is it of the same model and data? ─▶ Welcome, Fleet, then grants       else Refused
    Heartbeat ─▶ deadlines move; what nobody wants ─▶ Cancelled
    Finished ──▶ admissible ─▶ accept, or fail ─────▶ Acknowledged, then grants
    Failed ────▶ fail ──────────────────────────────▶ Acknowledged, then grants
    Goodbye ───▶ its leases go to others

The moves themselves (`accept`, `fail`, `part`, `pump`) are the intake's.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from learner.intake.admission import admissible
from learner.intake.evaluation import Evaluator
from learner.intake.granting import Granting
from learner.intake.holders import Holder, Holders
from learner.intake.options import IntakeOptions
from learner.ledger import AttemptId, Ledger
from learner.weights.fleet import Fleet
from protocol.messages import (
    Acknowledged,
    Cancelled,
    Failed,
    Finished,
    Goodbye,
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

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What messages bring about: the intake's part. `pump` grants whatever may be granted now."""

    accept: Callable[[TrajectoryGroup], Awaitable[None]]
    fail: Callable[[Failed], None]
    part: Callable[[Holder], Awaitable[None]]
    pump: Callable[[], Awaitable[None]]
    stir: Callable[[], None]


class Conversation:
    """Takes the messages of all env_services, one after the other. `clock` is in seconds."""

    def __init__(
        self,
        *,
        socket: RouterSocket,
        holders: Holders,
        ledger: Ledger,
        evaluator: Evaluator,
        granting: Granting,
        fleet: Fleet,
        options: IntakeOptions,
        moves: Moves,
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._holders = holders
        self._ledger = ledger
        self._evaluator = evaluator
        self._granting = granting
        self._fleet = fleet
        self._options = options
        self._moves = moves
        self._refused = refused
        self._clock = clock

    async def receive(self) -> None:
        """Takes messages until cancelled."""
        while True:
            peer, message = await self._socket.receive()
            await self._handle(peer, message)

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
                await self._moves.part(holder)
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
        info = holder.agreed(self._options.environment)
        if is_new:
            log.info("env_service %s offers %s, %d groups at once", holder.name, info.name, hello.capacity)
        self._granting.know_tasks(info.train_tasks)
        options = self._options
        await self._holders.send(
            holder, Welcome(incarnation=options.incarnation, heartbeat_every_s=options.heartbeat_every_s)
        )
        await self._holders.send(holder, FleetMessage(generators=tuple(self._fleet.serving())))
        self._moves.stir()
        await self._moves.pump()

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
        tasks = holder.agreed(options.environment).train_tasks
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
                self._moves.fail(kept)
            else:
                await self._moves.accept(kept)
        await self._acknowledge(holder, group.lease_id, group.attempt, group)

    async def _on_failed(self, holder: Holder, failed: Failed) -> None:
        if failed.purpose == "evaluate":
            self._evaluator.failed(failed.lease_id)
        else:
            self._moves.fail(failed)
        await self._acknowledge(holder, failed.lease_id, failed.attempt, failed)

    async def _acknowledge(
        self, holder: Holder, lease_id: int, attempt: int, outcome: TrajectoryGroup | Failed
    ) -> None:
        if outcome.purpose == "train":
            holder.running.discard(AttemptId(lease_id, attempt))
        message = Acknowledged(lease_id=lease_id, attempt=attempt, purpose=outcome.purpose)
        await self._holders.send(holder, message)
        self._moves.stir()
        await self._moves.pump()


def _number(version: str | None) -> int | None:
    return None if version is None else PolicyVersion.parse(version).number
