"""The env_services that said hello: their addresses, what each can run, and which leases each holds."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from learner.ledger import AttemptId, EndedAttempt
from protocol.messages import MOST_LEASES, Cancelled, EnvironmentInfo, Hello, Message, RunningLease
from services.zmq.sockets import PeerGone, RouterSocket, SocketError

log = logging.getLogger(__name__)

_SEND_S = 0.5
"""Longest wait for room in one peer's queue: the others' messages wait with it."""


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

    def __init__(self, socket: RouterSocket, *, on_the_wire: Callable[[AttemptId], RunningLease]) -> None:
        self._socket = socket
        self._on_the_wire = on_the_wire
        self._by_name: dict[str, Peer] = {}
        self._names: dict[str, str] = {}

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

    def welcome(self, *, peer: str, hello: Hello, now: float) -> tuple[Peer, bool]:
        """Takes an env_service in; also says whether it is a new one. One that comes again keeps its leases."""
        known = self._by_name.get(hello.env_id)
        if known is not None:
            self._names.pop(known.peer, None)
        holder = Peer(peer=peer, hello=hello, last_seen=now, running=known.running if known else set())
        self._by_name[hello.env_id] = holder
        self._names[peer] = hello.env_id
        return holder, known is None

    def part(self, holder: Peer) -> None:
        """Forgets an env_service."""
        self._by_name.pop(holder.name, None)
        self._names.pop(holder.peer, None)

    def stood_still(self, seconds: float) -> None:
        """The learner did nothing for so long, and heard nothing either."""
        for holder in self._by_name.values():
            holder.last_seen += seconds

    def release(self, attempts: Iterable[AttemptId]) -> None:
        """These attempts are over, whoever held them."""
        over = set(attempts)
        for holder in self._by_name.values():
            holder.running -= over

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

    async def broadcast(self, message: Message) -> None:
        """Sends to all."""
        for holder in self:
            await self.send(holder, message)

    async def cancel(self, ended: Iterable[EndedAttempt]) -> None:
        """These attempts are over; tells their holders that nobody waits for them any more."""
        ended = tuple(ended)
        self.release(AttemptId(attempt.lease_id, attempt.attempt) for attempt in ended)
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
