"""Env_services that said hello: by name and by address, their running leases, and what is sent to them."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from learner.ledger import AttemptId, EndedAttempt
from protocol.messages import (
    MAX_LEASES,
    EnvironmentInfo,
    Fleet,
    Hello,
    LeaseCancellation,
    Message,
    RunningLease,
    ServingGenerator,
    StatusNote,
)
from services.zmq.sockets import PeerGone, RouterSocket, SocketError

logger = logging.getLogger(__name__)


_SEND_S = 0.5
"""Longest wait for room in one peer's queue: the others' messages wait with it."""
ON_ITS_WAY_S = 2.0
"""A heartbeat within so many seconds of a telling may have been sent before that arrived."""
_TELLING_SHARE = 0.05
_NOTE_HOLDS_S = 40.0
"""Longer than the longest pause between two notes of one that has not been welcomed."""
_MAX_NOTES = 1024
_MAX_QUIET_S = 5.0


@dataclass
class ConnectedEnvService:
    """An env_service under its socket's address. `running` are its training leases, `evaluated_last` tells that its
    last grant was of an evaluation. It said hello again at `greeted_again`, in seconds, and what it lists since then
    has not been compared with what it was granted; None if it has, or need not be. `parts` are those of a mix that its
    training leases are of, by lease id, as far as that was looked up.
    """

    peer: str
    hello: Hello
    last_seen: float
    running: set[AttemptId] = field(default_factory=set)
    evaluated_last: bool = False
    greeted_again: float | None = None
    parts: dict[int, int] = field(default_factory=dict)

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
        self._notes: dict[str, tuple[float, StatusNote]] = {}
        self._all_told = True
        self._quiet_until = self._told_at = -math.inf
        self._by_name: dict[str, ConnectedEnvService] = {}
        self._names: dict[str, str] = {}
        self._may_have_room: dict[str, None] = {}

    def note(self, note: StatusNote) -> None:
        """Keeps the newest note of each that sends some; of too many, the oldest is forgotten."""
        self._notes.pop(note.status.id, None)
        self._notes[note.status.id] = (self._clock(), note)
        if len(self._notes) > _MAX_NOTES:
            del self._notes[next(iter(self._notes))]

    def notes(self) -> list[StatusNote]:
        """The notes of those that are there, or try to be."""
        now = self._clock()
        return [note for heard, note in self._notes.values() if now - heard <= _NOTE_HOLDS_S]

    def __iter__(self) -> Iterator[ConnectedEnvService]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def at(self, peer: str) -> ConnectedEnvService | None:
        """The env_service at this address."""
        return self._by_name.get(self._names.get(peer, ""))

    def named(self, env_id: str) -> ConnectedEnvService | None:
        """The env_service of this name."""
        return self._by_name.get(env_id)

    def has(self, holder: ConnectedEnvService) -> bool:
        """True if it is still there, under the same address."""
        return self._by_name.get(holder.name) is holder

    def with_room(self) -> Iterator[ConnectedEnvService]:
        """Env_services that may have room for more leases: all not known to be full."""
        for name in list(self._may_have_room):
            holder = self._by_name.get(name)
            if holder is not None:  # it may have left while another one's grant was sent
                yield holder

    def full(self, holder: ConnectedEnvService) -> None:
        """It has no room for a lease, as was just seen."""
        self._may_have_room.pop(holder.name, None)

    def look_again(self) -> None:
        """Any of them may have room."""
        self._may_have_room = dict.fromkeys(self._by_name)

    def ended(self, holder: ConnectedEnvService, attempts: Iterable[AttemptId] = ()) -> None:
        """This one does not run these training attempts any more, or has ended one of an evaluation."""
        holder.running.difference_update(attempts)
        if holder.name in self._by_name:
            self._may_have_room[holder.name] = None

    def welcome(self, *, peer: str, hello: Hello, now: float) -> tuple[ConnectedEnvService, bool]:
        """Takes an env_service in; also says whether it is a new one. One that comes again keeps its leases."""
        known = self._by_name.get(hello.env_id)
        if known is not None:
            self._names.pop(known.peer, None)
        holder = ConnectedEnvService(peer=peer, hello=hello, last_seen=now)
        if known is not None:
            holder.running, holder.greeted_again = known.running, now
        self._by_name[hello.env_id] = holder
        self._names[peer] = hello.env_id
        self._may_have_room[hello.env_id] = None
        return holder, known is None

    def part(self, holder: ConnectedEnvService) -> None:
        """Forgets an env_service."""
        self._by_name.pop(holder.name, None)
        self._names.pop(holder.peer, None)
        self._may_have_room.pop(holder.name, None)
        self._notes.pop(holder.name, None)

    def stood_still(self, seconds: float) -> None:
        """The learner did nothing for so long, and heard nothing either."""
        for holder in self._by_name.values():
            holder.last_seen += seconds
            if holder.greeted_again is not None:
                holder.greeted_again += seconds

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

    async def send(self, holder: ConnectedEnvService, message: Message) -> None:
        """Sends, or notes that the peer is gone: its leases then expire."""
        await self.answer(holder.peer, message)

    async def answer(self, peer: str, message: Message) -> bool:
        """Sends to an address that need not be a holder's; False if nobody is connected there any more."""
        try:
            await self._socket.send(peer, message, deadline_s=_SEND_S)
        except SocketError as error:
            logger.debug("a %s could not be sent: %s", message.kind, error)
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
        self._fleet = Fleet(generators=generators, number=self._fleet.number + 1)
        self._all_told, self._quiet_until = False, math.inf
        try:
            self._all_told = await self.broadcast(self._fleet)
        finally:
            ended = self._told_at = self._clock()
            self._quiet_until = ended + min((ended - began) / _TELLING_SHARE, _MAX_QUIET_S)

    async def tell_fleet_to(self, holder: ConnectedEnvService) -> None:
        """Tells one that has come what the others were told last."""
        await self.send(holder, self._fleet)

    async def tell_fleet_again(self, holder: ConnectedEnvService, *, heard: int) -> None:
        """Tells one that has heard of another fleet last: what was sent over a link that broke is lost."""
        if heard != self._fleet.number and self._clock() - self._told_at > ON_ITS_WAY_S:
            await self.tell_fleet_to(holder)

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

    async def tell_cancelled(self, holder: ConnectedEnvService, leases: Sequence[RunningLease]) -> None:
        """Nobody waits for these any more."""
        for start in range(0, len(leases), MAX_LEASES):
            await self.send(holder, LeaseCancellation(leases=tuple(leases[start : start + MAX_LEASES])))
