"""The conversation between the learner and its env_services: each message of theirs, and the answer to it.

    Hello ─────▶ is it of the same model and data? ─▶ Welcome, Fleet, then as at a heartbeat; what it was granted and
                 does not list goes to others; then grants; else Refused
    Heartbeat ─▶ deadlines move, attempts of former lives are adopted; what nobody wants ─▶ Cancelled; some time after a
                 repeated Hello, what it was granted and does not list goes to others
    Finished ──▶ proven? admissible ─▶ accept, or fail ▶ Acknowledged, then grants
    Failed ────▶ fail ──────────────────────────────▶ Acknowledged, then grants
    Goodbye ───▶ its leases go to others, but those that its next process keeps

Messages that have arrived together are taken together: what they are answered with is sent after the last of them, in
one go, and one grant of several leases takes the place of several of one.

Two processes under one name would take each other's leases away without end. So a hello under the name of another
process is refused while that one is connected and speaks; one that was started anew finds it gone, and is taken in.

What a message brings about is done by `GroupFlow`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.leases.admission import admissible, failure_of
from learner.leases.env_services import ON_ITS_WAY_S, ConnectedEnvService
from learner.leases.flow import GroupFlow
from learner.leases.options import IntakeOptions
from learner.teachers.limits import without_hint
from learner.weights.fleet import FleetMembers
from learner.weights.provenance import Standing
from protocol.codec import Frame
from protocol.fleet import TOLD_ALIKE
from protocol.messages import (
    MAX_LEASES,
    OTHERS,
    EnvironmentInfo,
    FailedLease,
    FinishedLease,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    OutcomeReceipt,
    PeerRefusal,
    RunningLease,
    StatusNote,
    Welcome,
    without_greedy_answer,
)
from protocol.trajectories import TrajectoryGroup
from services.logs import Occasionally
from services.zmq.sockets import ReceivedMessage, RouterSocket

logger = logging.getLogger(__name__)

MISSED_HEARTBEATS = 5
"""An env_service that missed so many may be gone."""

_COMPLAIN_EVERY_S = 10.0
_TAKEN_TOGETHER = 16
"""Messages, before their holders are answered and others have their turn in the event loop."""


@dataclass(frozen=True)
class _UnprovenGroup:
    """A group that is there, and is not acknowledged: a generator still owes the proof of what it sampled of it."""

    holder: ConnectedEnvService
    group: TrajectoryGroup
    frames: Sequence[Frame]


class EnvServiceConversation:
    """Takes the messages of all env_services, one after the other. `clock` is in seconds."""

    def __init__(
        self,
        *,
        socket: RouterSocket,
        flow: GroupFlow,
        fleet: FleetMembers,
        options: IntakeOptions,
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._flow = flow
        self._env_services = flow.env_services
        self._incarnations = flow.incarnations
        self._evaluator = flow.evaluator
        self._granting = flow.granting
        self._fleet = fleet
        self._options = options
        self._refused = refused
        self._clock = clock
        self._may_complain = Occasionally(every_s=_COMPLAIN_EVERY_S)
        self._held: dict[tuple[str, int, int, int], _UnprovenGroup] = {}
        self._recorded: list[tuple[ConnectedEnvService, OutcomeReceipt]] = []

    async def receive(self) -> None:
        """Takes messages until cancelled."""
        while True:
            await self._take(await self._socket.receive_whole())
            await asyncio.sleep(0)  # a socket that always has a message would let nobody else have a turn

    async def _take(self, first: ReceivedMessage) -> None:
        """Takes a message, and those that have arrived beside it."""
        received: ReceivedMessage | None = first
        taken = 0
        while received is not None:
            await self._handle(received.peer, received.message, received.frames)
            taken += 1
            received = await self._socket.receive_now() if taken < _TAKEN_TOGETHER else None
        await self._answer()

    async def _handle(self, peer: str, message: Message, frames: Sequence[Frame]) -> None:
        if not isinstance(message, FinishedLease | FailedLease):
            await self._answer()  # who is told of another thing has heard before what became of its groups
        holder = self._env_services.at(peer)
        if isinstance(message, StatusNote):
            self._env_services.note(message)
            if holder is not None:
                holder.last_seen = self._clock()
        elif isinstance(message, Hello):
            await self._on_hello(peer, message)
        elif holder is None:
            await self._refuse(peer, "unknown_peer", f"a {message.kind} before a hello: say hello first")
        else:
            holder.last_seen = self._clock()
            await self._on_message(holder, message, frames)

    async def _on_message(self, holder: ConnectedEnvService, message: Message, frames: Sequence[Frame]) -> None:
        match message:
            case Heartbeat():
                await self._hear(holder, message.running)
                await self._compare_again(holder, message.running)
                if message.fleet is not None:
                    await self._env_services.tell_fleet_again(holder, heard=message.fleet)
            case FinishedLease():
                await self._on_finished(holder, message.group, frames)
            case FailedLease():
                await self._on_failed(holder, message)
            case Goodbye():
                logger.info("env_service %s leaves: %s", holder.name, message.reason)
                await self._flow.peer_left(holder, keeps=message.keeps)
            case _:
                text = f"a {message.kind} is for env_services, the learner does not take it"
                await self._refuse(holder.peer, "unexpected", text)

    async def _refuse(self, peer: str, reason: str, message: str) -> None:
        self._refused(reason)
        await self._env_services.answer(peer, PeerRefusal(reason=reason, message=message))

    async def _on_hello(self, peer: str, hello: Hello) -> None:
        candidate = ConnectedEnvService(peer=peer, hello=hello, last_seen=self._clock())
        fault = self._fault_of(candidate)
        if fault is not None:
            logger.warning("env_service %s is refused: %s", hello.env_id, fault)
            await self._refuse(peer, "hello", fault)
            return
        known = self._env_services.named(hello.env_id)
        if known is not None and known.hello.instance != hello.instance:
            if known.peer != peer and await self._is_there(known, namesake=hello):
                await self._refuse_namesake(peer, hello, known)
                return
            await self._replace(known, goes_on_with=hello.running if hello.run == self._options.run else ())
        holder, is_new = self._env_services.welcome(peer=peer, hello=hello, now=self._clock())
        info = holder.agreed(self._options.environment)
        if is_new:
            logger.info(
                "env_service %s connected: environment %s, room for %d groups", holder.name, info.name, hello.capacity
            )
        self._granting.know_tasks(info)
        options = self._options
        await self._env_services.send(
            holder,
            Welcome(run=options.run, incarnation=options.incarnation, heartbeat_every_s=options.heartbeat_every_s),
        )
        await self._env_services.tell_fleet_to(holder)
        if hello.run == options.run:
            await self._hear(holder, hello.running, is_back=is_new)
            self._end_unlisted(holder, hello.running)
        self._flow.wake()
        await self._flow.grant_all()

    def _end_unlisted(self, holder: ConnectedEnvService, running: Sequence[RunningLease]) -> None:
        """Has training leases granted again that nobody runs: after a cut of the link a grant is lost, and nobody would
        say so. Those of evaluations are left to their expiry.
        """
        if len(running) == MAX_LEASES:  # one message lists no more
            return
        training = [lease for lease in running if lease.purpose == "train"]
        ended = self._incarnations.unlisted(
            now=self._clock(), holder=holder.name, running=training, since_s=ON_ITS_WAY_S
        )
        if ended:
            logger.info(
                "env_service %s lacks %d leases that it was granted: they go to others", holder.name, len(ended)
            )
            self._flow.forget(ended, why="expired")

    async def _compare_again(self, holder: ConnectedEnvService, running: Sequence[RunningLease]) -> None:
        """Ends what a hello could not: a grant just before it may have been on its way, and one that was made after a
        welcome that was lost, too, is of a run that the hello does not name. Several hellos that were sent one after
        the other to a learner that was away look alike, so a hello alone does not tell that the welcome was lost.
        """
        if holder.greeted_again is None:
            return
        if max(len(running), len(holder.running)) >= MAX_LEASES:  # this may be a part of what it runs
            holder.greeted_again = None
        elif self._clock() > holder.greeted_again + ON_ITS_WAY_S:
            holder.greeted_again = None
            self._end_unlisted(holder, running)
            self._flow.wake()
            await self._flow.grant_all()

    async def _replace(self, former: ConnectedEnvService, *, goes_on_with: Sequence[RunningLease]) -> None:
        """Another process has the name of an env_service that is gone."""
        logger.info(
            "env_service %s was restarted: it goes on with %d leases, and the others that it had go to others",
            former.name, len(goes_on_with),
        )  # fmt: skip
        await self._flow.peer_left(former, keeps=goes_on_with)

    async def _is_there(self, known: ConnectedEnvService, *, namesake: Hello) -> bool:
        """Tells the holder of a name that another process wants it, which also shows whether it is still connected."""
        silence_s = self._clock() - known.last_seen
        if silence_s > MISSED_HEARTBEATS * self._options.heartbeat_every_s:
            return False
        text = f"another env_service, at {namesake.address or 'an unknown address'}, uses this one's name {known.name}"
        return await self._env_services.answer(known.peer, PeerRefusal(reason="namesake", message=text))

    async def _refuse_namesake(self, peer: str, hello: Hello, known: ConnectedEnvService) -> None:
        first = known.hello.address or "an unknown address"
        fault = (
            f"the name {hello.env_id} is taken: an env_service at {first} uses it, "
            f"and was heard {self._clock() - known.last_seen:.1f} s ago; give each its own env_id, or stop the other"
        )
        if self._may_complain():
            logger.warning("an env_service at %s is refused: %s", hello.address or "an unknown address", fault)
        await self._refuse(peer, "name_taken", fault)

    def _fault_of(self, holder: ConnectedEnvService) -> str | None:
        options, hello = self._options, holder.hello
        for what, ours, theirs, remedy in (
            ("tokenizer", options.tokenizer, hello.tokenizer, ""),
            ("chat template", options.chat_template, hello.chat_template, TOLD_ALIKE),
        ):
            if ours != theirs:
                return (
                    f"its {what} has fingerprint {theirs}, the learner's {ours}: use the same model directory{remedy}"
                )
        if holder.environment(options.environment) is None:
            offered = ", ".join(info.name for info in hello.environments)
            wanted = options.environment or "exactly one environment (rollouts.environment is not set)"
            return f"the learner wants {wanted}, env_service {hello.env_id} offers {offered}"
        info = holder.agreed(options.environment)
        if options.rules.greedy_baseline and info.no_greedy_answer and self._granting.trains:
            return without_greedy_answer(info.no_greedy_answer)
        teacher = options.rules.teaching.shown_more(info.name)
        if teacher is not None and not info.teacher_hint and self._granting.trains:
            return without_hint(teacher, info.name)
        tasks = info.train_tasks
        if info.levels > tasks:
            return (
                f"its environment {info.name} has {info.levels} levels and {tasks} training tasks, "
                f"expected at least one task for each level: give it more tasks, or fewer levels"
            )
        return None if self._granting.known is None else _difference(info, self._granting.known)

    async def _hear(
        self, holder: ConnectedEnvService, running: Sequence[RunningLease], *, is_back: bool = False
    ) -> None:
        """These attempts are alive at an env_service; those that nobody wants are cancelled."""
        now = self._clock()
        training = [lease for lease in running if lease.purpose == "train"]
        heard = self._incarnations.hear(
            now=now,
            holder=holder.name,
            running=training,
            disk_is_full=self._flow.room.is_missing(),
            is_back=is_back,
        )
        if heard.adopted:
            logger.info(
                "env_service %s goes on with %d leases from before the restart", holder.name, len(heard.adopted)
            )
        holder.running.update(heard.alive)
        if heard.unwanted:
            self._env_services.ended(holder, filter(None, map(self._incarnations.attempt_of, heard.unwanted)))
        evaluated = [lease for lease in running if lease.purpose == "evaluate"]
        leases = (*heard.unwanted, *self._not_evaluated(evaluated, now=now, holder=holder))
        await self._env_services.tell_cancelled(holder, leases)

    def _not_evaluated(
        self, leases: Sequence[RunningLease], *, now: float, holder: ConnectedEnvService
    ) -> list[RunningLease]:
        ours = {lease.lease_id: lease for lease in leases if self._incarnations.is_ours(lease)}
        nobody_serves = self._fleet.served is None
        excused = {number for number, lease in ours.items() if nobody_serves or lease.waits_for in OTHERS}
        unwanted = self._evaluator.heartbeat(now=now, holder=holder.name, lease_ids=ours, excused=excused)
        return [lease for lease in leases if not self._incarnations.is_ours(lease)] + [
            ours[number] for number in unwanted
        ]

    async def proofs_came(self) -> None:
        """Takes up the groups that waited for a proof. One whose holder has left is sent again when that comes back."""
        for key, held in list(self._held.items()):
            if self._held.pop(key, None) is not None and self._env_services.has(held.holder):
                await self._on_finished(held.holder, held.group, held.frames)
        await self._answer()

    async def _on_finished(self, holder: ConnectedEnvService, group: TrajectoryGroup, frames: Sequence[Frame]) -> None:
        provenance = self._fleet.provenance
        match provenance.standing(group):
            case Standing.PROVEN:
                await self._on_proven(holder, group, frames)
            case Standing.AWAITED:
                key = (group.purpose, group.incarnation, group.lease_id, group.attempt)
                self._held[key] = _UnprovenGroup(holder, group, frames)
            case Standing.UNPROVEN:
                self._refused("unproven")
                await self._on_failed(holder, failure_of(group, reason=provenance.fault(group), data_fault=False))

    async def _on_proven(self, holder: ConnectedEnvService, group: TrajectoryGroup, frames: Sequence[Frame]) -> None:
        if group.purpose == "evaluate":
            if self._incarnations.is_ours(group):
                self._evaluator.finished(group)
        else:
            kept = admissible(group, rules=self._options.rules, belongs=self._incarnations.belongs)
            if isinstance(kept, FailedLease):
                self._flow.fail(kept)
            elif not await self._flow.accept(kept, frames if kept is group else None):
                self._refused("disk_full")
                return
        self._acknowledge(holder, group)

    async def _on_failed(self, holder: ConnectedEnvService, failed: FailedLease) -> None:
        if failed.purpose == "train":
            self._flow.fail(failed)
        elif self._incarnations.is_ours(failed):
            self._evaluator.failed(failed.lease_id, reason=failed.reason)
        self._acknowledge(holder, failed)

    def _acknowledge(self, holder: ConnectedEnvService, outcome: TrajectoryGroup | FailedLease) -> None:
        attempt = self._incarnations.attempt_of(outcome) if outcome.purpose == "train" else None
        self._env_services.ended(holder, () if attempt is None else (attempt,))
        message = OutcomeReceipt(
            incarnation=outcome.incarnation,
            lease_id=outcome.lease_id,
            attempt=outcome.attempt,
            purpose=outcome.purpose,
        )
        self._recorded.append((holder, message))

    async def _answer(self) -> None:
        """Acknowledges what was recorded since the last time, and grants what there is room for now."""
        if not self._recorded:
            return
        recorded, self._recorded = self._recorded, []
        for holder, message in recorded:
            await self._env_services.send(holder, message)
        self._flow.wake()
        await self._flow.grant_all()


def _difference(info: EnvironmentInfo, first: EnvironmentInfo) -> str | None:
    """Tells why tasks of the same index are not the same ones; None if they are."""
    for what, theirs, ours in (
        ("training tasks", info.train_tasks, first.train_tasks),
        ("evaluation tasks", info.evaluation_tasks, first.evaluation_tasks),
        ("levels", info.levels, first.levels),
    ):
        if theirs != ours:
            return (
                f"its environment has {theirs} {what}, that of the first env_service of this run "
                f"{ours}: give all of them the same data, or restart the learner"
            )
    if [(part.places, part.tasks) for part in info.parts] != [(part.places, part.tasks) for part in first.parts]:
        return (
            f"its environment {info.name} is mixed of other parts than that of the first env_service of this run: give "
            "all of them the same data in the same shares, or restart the learner"
        )
    if info.chat_template != first.chat_template:
        return (
            f"its environment {info.name} tells the chat template something else than that of the first "
            "env_service of this run: give all of them the same chat_template_kwargs, or restart the learner"
        )
    return None
