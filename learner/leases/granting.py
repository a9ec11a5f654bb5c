"""Env_services that said hello, and the leases that they are granted: how many, as pacing and the lag bound allow, and
for which tasks, evaluation before training.

Groups that wait in the buffer only grow older. So the learner asks for as few groups at once as keep it from waiting:
more when it had to wait for a batch, fewer when a good part of another batch lay ready. That is the rule `demand`. With
`full` it always asks for as many as the bound permits, and what is trained is as old as that. The hard bound is the
ledger's and does not depend on this.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.leases.curriculum import Curriculum, CurriculumRules, MakeCurriculum
from learner.leases.evaluation_leases import Evaluator
from learner.ledger import AttemptId, EndedAttempt, Grant, Ledger
from protocol.generation import Sampling
from protocol.messages import (
    MOST_LEASES,
    Cancelled,
    EnvironmentInfo,
    Fleet,
    Hello,
    Lease,
    Message,
    RunningLease,
    ServingGenerator,
)
from protocol.trajectories import TrajectoryGroup
from services.tracing import lease_began, lease_trace
from services.zmq.sockets import PeerGone, RouterSocket, SocketError

log = logging.getLogger(__name__)

_SEND_S = 0.5
"""Longest wait for room in one peer's queue: the others' messages wait with it."""
_TELLING_SHARE = 0.05
_LONGEST_QUIET_S = 5.0


@dataclass
class Peer:
    """An env_service under its socket's address. `running` are its training leases, `evaluated_last` tells that its
    last grant was of an evaluation.
    """

    peer: str
    hello: Hello
    last_seen: float
    running: set[AttemptId] = field(default_factory=set)
    evaluated_last: bool = False

    @property
    def name(self) -> str:
        return self.hello.env_id

    def environment(self, name: str | None) -> EnvironmentInfo | None:
        """The environment of that name, or the only one if no name is given; None if it is not offered."""
        offered = self.hello.environments
        if name is None:
            return offered[0] if len(offered) == 1 else None
        return next((info for info in offered if info.name == name), None)

    def agreed(self, name: str | None) -> EnvironmentInfo:
        """The same, of an env_service that offers it: one that does not is not taken in."""
        info = self.environment(name)
        assert info is not None, (self.name, name)
        return info


class EnvServices:
    """All env_services, by name and by address. Sends hardly wait: what a peer does not take is lost, and its leases
    expire. `on_the_wire` names an attempt as its holder knows it.
    """

    def __init__(
        self,
        socket: RouterSocket,
        *,
        on_the_wire: Callable[[AttemptId], RunningLease],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._on_the_wire = on_the_wire
        self._clock = clock
        self._fleet = Fleet(generators=())
        self._all_told = True
        self._quiet_until = -math.inf
        self._by_name: dict[str, Peer] = {}
        self._names: dict[str, str] = {}
        self._may_have_room: dict[str, None] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def at(self, peer: str) -> Peer | None:
        """Who speaks from this address."""
        return self._by_name.get(self._names.get(peer, ""))

    def named(self, env_id: str) -> Peer | None:
        """Who goes by this name."""
        return self._by_name.get(env_id)

    def has(self, holder: Peer) -> bool:
        """Whether it is still there, under the same address."""
        return self._by_name.get(holder.name) is holder

    def with_room(self) -> Iterator[Peer]:
        """Those that may have room for more leases: all but who was found `full` and has ended nothing since."""
        for name in list(self._may_have_room):
            holder = self._by_name.get(name)
            if holder is not None:  # it may have left while another one's grant was sent
                yield holder

    def full(self, holder: Peer) -> None:
        """It has no room for a lease, as was just seen."""
        self._may_have_room.pop(holder.name, None)

    def look_again(self) -> None:
        """Any of them may have room."""
        self._may_have_room = dict.fromkeys(self._by_name)

    def ended(self, holder: Peer, attempts: Iterable[AttemptId] = ()) -> None:
        """This one does not run these training attempts any more, or has ended one of an evaluation."""
        holder.running.difference_update(attempts)
        if holder.name in self._by_name:
            self._may_have_room[holder.name] = None

    def welcome(self, *, peer: str, hello: Hello, now: float) -> tuple[Peer, bool]:
        """Takes an env_service in; also says whether it is a new one. One that comes again keeps its leases."""
        known = self._by_name.get(hello.env_id)
        if known is not None:
            self._names.pop(known.peer, None)
        holder = Peer(peer=peer, hello=hello, last_seen=now, running=known.running if known else set())
        self._by_name[hello.env_id] = holder
        self._names[peer] = hello.env_id
        self._may_have_room[hello.env_id] = None
        return holder, known is None

    def part(self, holder: Peer) -> None:
        """Forgets an env_service."""
        self._by_name.pop(holder.name, None)
        self._names.pop(holder.peer, None)
        self._may_have_room.pop(holder.name, None)

    def stood_still(self, seconds: float) -> None:
        """The learner did nothing for so long, and heard nothing either."""
        for holder in self._by_name.values():
            holder.last_seen += seconds

    def release(self, ended: Iterable[EndedAttempt]) -> None:
        """These attempts are over. Those that nobody runs any more may still be in somebody's books."""
        unheld: set[AttemptId] = set()
        for attempt in ended:
            named = AttemptId(attempt.lease_id, attempt.attempt)
            holder = self._by_name.get(attempt.holder or "")
            if holder is not None:
                self.ended(holder, (named,))
            elif attempt.holder is None:
                unheld.add(named)
        for holder in self._by_name.values() if unheld else ():
            if not unheld.isdisjoint(holder.running):
                self.ended(holder, unheld)

    async def send(self, holder: Peer, message: Message) -> None:
        """Sends, or notes that the peer is gone: its leases then expire."""
        await self.answer(holder.peer, message)

    async def answer(self, peer: str, message: Message) -> bool:
        """Sends to an address that need not be a holder's; False if nobody is connected there any more."""
        try:
            await self._socket.send(peer, message, deadline_s=_SEND_S)
        except SocketError as error:
            log.debug("a %s could not be sent: %s", message.kind, error)
            return not isinstance(error, PeerGone)
        return True

    async def broadcast(self, message: Message) -> bool:
        """Sends to all, encoded once; those that take nothing are waited for together. False if one took nothing."""
        return not await self._socket.send_to_all([holder.peer for holder in self], message, deadline_s=_SEND_S)

    async def tell_fleet(self, serving: Iterable[ServingGenerator]) -> None:
        """Tells all who serves, if that has changed. Telling a thousand of a thousand takes a while: so that only a
        small share of the time is spent on it, what changes soon after is left to a later call; so is one that did not
        take it.
        """
        began = self._clock()
        if began < self._quiet_until:
            return
        generators = tuple(serving)
        if self._all_told and generators == self._fleet.generators:
            return
        self._fleet, self._all_told, self._quiet_until = Fleet(generators=generators), False, math.inf
        try:
            self._all_told = await self.broadcast(self._fleet)
        finally:
            ended = self._clock()
            self._quiet_until = ended + min((ended - began) / _TELLING_SHARE, _LONGEST_QUIET_S)

    async def tell_fleet_to(self, holder: Peer) -> None:
        """Tells one that has come what the others were told last."""
        await self.send(holder, self._fleet)

    async def cancel(self, ended: Iterable[EndedAttempt]) -> None:
        """These attempts are over; tells their holders that nobody waits for them any more."""
        ended = tuple(ended)
        self.release(ended)
        by_holder: dict[str, list[RunningLease]] = {}
        for attempt in ended:
            if attempt.holder is not None:
                lease = self._on_the_wire(AttemptId(attempt.lease_id, attempt.attempt))
                by_holder.setdefault(attempt.holder, []).append(lease)
        for name, leases in by_holder.items():
            holder = self._by_name.get(name)
            if holder is not None:
                await self.tell_cancelled(holder, leases)

    async def tell_cancelled(self, holder: Peer, leases: Sequence[RunningLease]) -> None:
        """Nobody waits for these any more."""
        for start in range(0, len(leases), MOST_LEASES):
            await self.send(holder, Cancelled(leases=tuple(leases[start : start + MOST_LEASES])))


PacingRule = Literal["demand", "full"]

_WAITED_SHARE = 0.05
_GROW, _SHRINK = 0.1, 0.05
_SPARE = 0.15


@dataclass
class Pacing:
    """`ahead` is the number of groups that may be running or buffered; it moves between one step's and the bound's."""

    groups_per_step: int
    max_lag: int
    rule: PacingRule = "demand"
    ahead: float = 0.0

    def __post_init__(self) -> None:
        self.ahead = self._most if self.rule == "full" else min(2.0 * self.groups_per_step, self._most)

    @property
    def _most(self) -> float:
        return (self.max_lag + 1.0) * self.groups_per_step

    def bound(self, max_lag: int) -> None:
        """The bound is another one now: no more groups are asked for ahead than it permits."""
        self.max_lag = max_lag
        self.ahead = self._most if self.rule == "full" else min(self.ahead, self._most)

    def taken(self, *, waited_s: float, since_last_s: float, left_over: int) -> None:
        """A batch was taken: the trainer had waited so long for it, and so many groups stay in the buffer."""
        if self.rule == "full":
            return
        step = self.groups_per_step
        if waited_s > _WAITED_SHARE * since_last_s:
            self.ahead = min(self.ahead + _GROW * step, self._most)
        elif left_over > _SPARE * step:
            self.ahead = max(self.ahead - _SHRINK * step, float(step))

    def room(self, *, running: int, buffered: int) -> int:
        """How many more groups may be granted now."""
        return max(0, int(self.ahead) - running - buffered)


_SEED_LIMIT = 1 << 63


class TaskOrder:
    """Maps the endless row of leases onto `count` tasks. Pure: the same seed gives the same order after a restart."""

    def __init__(self, *, count: int, seed: int) -> None:
        assert count > 0, count
        self.count = count
        self._seed = seed
        self._epoch = lru_cache(maxsize=4)(self._permutation)

    def task_index(self, lease_id: int) -> int:
        """The task of a lease, in 0..count-1."""
        epoch, position = divmod(lease_id, self.count)
        return int(self._epoch(epoch)[position])

    def lease_seed(self, lease_id: int, *, attempt: int) -> int:
        """A seed for the rollouts of one attempt, in 0..2**63-1."""
        words = np.random.SeedSequence((self._seed, lease_id, attempt)).generate_state(1, dtype=np.uint64)
        return int(words[0]) % _SEED_LIMIT

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self._seed, epoch)).permutation(self.count)


_MOST_LEASES_IN_A_GRANT = 1024


@dataclass(frozen=True)
class LeaseTerms:
    """What every training lease says. `total_groups` is what all steps together consume: no more are granted."""

    group_size: int
    sampling: Sampling
    seed: int
    timeout_s: float
    total_groups: int


class Granting:
    """Turns the ledger's grants into leases. `order` is known once the first env_service has said hello."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        evaluator: Evaluator,
        terms: LeaseTerms,
        incarnation: int,
        clock: Callable[[], float],
        pacing: PacingRule = "demand",
        make_curriculum: MakeCurriculum = lambda levels: Curriculum(levels=levels, rules=CurriculumRules()),
    ) -> None:
        self._make_curriculum = make_curriculum
        self._ledger = ledger
        self._evaluator = evaluator
        self._terms = terms
        self._incarnation = incarnation
        self._clock = clock
        self._pacing = Pacing(groups_per_step=ledger.config.groups_per_step, max_lag=ledger.config.max_lag, rule=pacing)
        self._last_taken = clock()
        self.order: TaskOrder | None = None
        self.curriculum: Curriculum | None = None
        """None while there is one level."""
        self.tasks: int | None = None
        self.chat_template = ""

    def know_tasks(self, count: int, *, levels: int = 1, chat_template: str = "") -> None:
        """Notes the number of training tasks of the environment, in `levels` of equal size, and the fingerprint of its
        chat template; later calls change nothing.
        """
        if self.order is None:
            self.order = TaskOrder(count=count // levels, seed=self._terms.seed)
            self.curriculum = self._make_curriculum(levels) if levels > 1 else None
            self.tasks = count
            self.chat_template = chat_template

    def task_index(self, lease_id: int) -> int:
        """The task of a lease, the same at each of its grants: that of its place in the epoch, of its level."""
        assert self.order is not None, "nothing was granted yet"
        level = 0 if self.curriculum is None else self.curriculum.level_of(lease_id)
        return level * self.order.count + self.order.task_index(lease_id)

    def accepted(self, group: TrajectoryGroup) -> None:
        """A group of some level was taken in, which may be what changes the level of new leases."""
        if self.curriculum is not None:
            self.curriculum.accepted(group, next_lease=self._ledger.books().leases)

    def batch_taken(self, *, asked_at: float) -> None:
        """A batch has left the buffer, which the trainer had asked for at `asked_at`."""
        now = self._clock()
        self._pacing.taken(
            waited_s=now - asked_at, since_last_s=now - self._last_taken, left_over=self._ledger.books().buffered
        )
        self._last_taken = now

    def bound_changed(self) -> None:
        """The ledger bounds the lag by another number of versions."""
        self._pacing.bound(self._ledger.max_lag)

    def may_grant(self) -> bool:
        """Whether anybody with room would be granted something."""
        if self.order is None or self._ledger.served is None:
            return False
        return self._evaluator.has_waiting or min(self._still_needed(), self._ledger.places()) > 0

    def room_of(self, holder: Peer) -> int:
        """For how many more leases an env_service has room."""
        return holder.hello.capacity - len(holder.running) - self._evaluator.running(holder.name)

    def leases_for(self, holder: Peer, *, environment: str) -> list[Lease]:
        """What an env_service is granted now; it holds them from here on."""
        if self.order is None or self._ledger.served is None:
            return []
        evaluating = self._evaluator.running(holder.name)
        room = max(0, min(self.room_of(holder), _MOST_LEASES_IN_A_GRANT))
        leases = self._evaluator.grant(
            now=self._clock(),
            holder=holder.name,
            environment=environment,
            room=self._evaluation_room(holder, room=room, evaluating=evaluating),
        )
        holder.evaluated_last = bool(leases) or holder.evaluated_last
        room = min(room - len(leases), self._still_needed())
        if room > 0:
            grants = self._ledger.grant(now=self._clock(), holder=holder.name, room=room)
            holder.running.update(AttemptId(grant.lease_id, grant.attempt) for grant in grants)
            leases += [self._lease(grant, self.order, environment) for grant in grants]
            holder.evaluated_last = holder.evaluated_last and not grants
        return leases

    def _evaluation_room(self, holder: Peer, *, room: int, evaluating: int) -> int:
        """Beside training an evaluation has a share of the places; of a single one it has every other turn."""
        capacity = holder.hello.capacity
        if self._evaluator.is_beside and capacity == 1 and holder.evaluated_last:
            training = min(self._still_needed(), self._ledger.places())
            return 0 if training > 0 else room
        return min(room, max(0, self._evaluator.most_at(capacity) - evaluating))

    def _still_needed(self) -> int:
        books = self._ledger.books()
        left = self._terms.total_groups - books.trained - books.buffered - books.running
        return min(left, self._pacing.room(running=books.running, buffered=books.buffered))

    def _lease(self, grant: Grant, order: TaskOrder, environment: str) -> Lease:
        terms = self._terms
        lease_began(trace := lease_trace(self._incarnation, grant.lease_id))
        return Lease(
            incarnation=self._incarnation,
            lease_id=grant.lease_id,
            attempt=grant.attempt,
            purpose="train",
            environment=environment,
            task_index=self.task_index(grant.task_index),
            seed=order.lease_seed(grant.lease_id, attempt=grant.attempt),
            group_size=terms.group_size,
            sampling=terms.sampling,
            timeout_s=terms.timeout_s,
            trace=trace,
        )
