"""ZeroMQ in memory: what `services.zmq.sockets` asks of it, with its queues, its reconnects and its heartbeats.

A dealer keeps what it sends while it is not connected. A router forgets a peer whose connection broke, and gives an
identity to whoever came last with it; the one before is heard no more, until its heartbeats tell it so and it comes
again.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from simulation.world.clock import active
from simulation.world.network import Network, Pipe
from simulation.world.process import Process

_RECONNECT_S = 0.1
_MAX_RECONNECT_S = 2.0
_HEARTBEAT_S = 12.0
_QUEUED = 256


@dataclass
class Frame:
    """A zmq.Frame to its reader."""

    buffer: Any

    def get(self, option: int) -> int:
        """There is no descriptor."""
        return -1


class Switchboard:
    """Routers by address, dealers that want to reach them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.host = "learner"
        self.routers: dict[str, FakeSocket] = {}
        self.dealers: list[FakeSocket] = []
        self.seen: list[Any] = []

    def check_links(self, *, after_s: float) -> None:
        """A link was cut or a process stands still: heartbeats notice in so many seconds, if it lasts."""
        self.network.world.after(after_s, self._notice)

    def _notice(self) -> None:
        for dealer in list(self.dealers):
            peer = dealer.connection
            if peer is not None and not peer.is_well():
                peer.break_off()


@dataclass(eq=False)
class Connection:
    """Between a dealer and a router. `identity` may have been taken over by a later one: then nothing gets through."""

    dealer: "FakeSocket"
    router: "FakeSocket"
    there: Pipe
    back: Pipe
    taken_over: bool = False
    open: bool = True

    def is_well(self) -> bool:
        """True if each end hears the other."""
        ends = (self.dealer.process, self.router.process)
        if not all(end.alive and not end.stopped for end in ends):
            return False
        return not self.taken_over and self.there.network.connected(self.dealer.host, self.router.host)

    def break_off(self) -> None:
        """Both ends notice; what is under way is lost. The dealer comes again."""
        if not self.open:
            return
        self.open = False
        self.there.close()
        self.back.close()
        if self.router.peers.get(self.dealer.identity) is self:
            del self.router.peers[self.dealer.identity]
        self.dealer.connection = None
        if self.dealer.process.alive and not self.dealer.closed:
            self.dealer.try_soon(_RECONNECT_S)


@dataclass(eq=False)
class FakeSocket:
    """A ROUTER or a DEALER of one process."""

    kind: int
    board: Switchboard
    process: Process
    options: dict[int, Any] = field(default_factory=dict)
    address: str = ""
    identity: bytes = b""
    closed: bool = False
    connection: Connection | None = None
    peers: dict[bytes, Connection] = field(default_factory=dict)
    arrived: "deque[list[Frame]]" = field(default_factory=deque)
    unsent: "deque[list[bytes]]" = field(default_factory=deque)
    readers: "deque[asyncio.Future[None]]" = field(default_factory=deque)
    writers: "deque[asyncio.Future[None]]" = field(default_factory=deque)
    retry_s: float = _RECONNECT_S

    @property
    def host(self) -> str:
        return self.process.host

    def setsockopt(self, option: int, value: Any) -> None:
        self.options[option] = value
        if option == zmq.IDENTITY:
            self.identity = value

    def getsockopt_string(self, option: int) -> str:
        return self.address

    def bind(self, address: str) -> None:
        """Raises zmq.ZMQError if somebody who is alive has it. On another host than theirs, no dealer comes."""
        if self.host != self.board.host:
            self.address = address
            return
        holder = self.board.routers.get(address)
        if holder is not None and not holder.closed and holder.process.alive:
            raise zmq.ZMQError(errno.EADDRINUSE, "Address already in use")
        self.address = address
        self.board.routers[address] = self
        self.process.deaths.append(self._die)
        for dealer in self.board.dealers:
            dealer.try_soon(_RECONNECT_S)

    def connect(self, address: str) -> None:
        self.address = address
        self.board.dealers.append(self)
        self.process.deaths.append(self._die)
        self.try_soon(0.0)

    def close(self, linger: int = 0) -> None:
        if not self.closed:
            self._die()

    def _die(self) -> None:
        self.closed = True
        if self in self.board.dealers:
            self.board.dealers.remove(self)
        mine = [self.connection] if self.kind == zmq.DEALER else list(self.peers.values())
        for connection in filter(None, mine):
            delay = self.board.network.delay(connection.dealer.host, connection.router.host)
            if self.board.network.connected(connection.dealer.host, connection.router.host):
                self.board.network.world.after(delay, connection.break_off)
            else:
                self.board.network.world.after(_HEARTBEAT_S, connection.break_off)

    def try_soon(self, delay_s: float) -> None:
        """A dealer tries to connect."""
        if self.connection is None:
            self.board.network.world.after(delay_s, self._try)

    def _try(self) -> None:
        if self.closed or self.connection is not None or not self.process.alive:
            return
        router = self.board.routers.get(self.address)
        network = self.board.network
        there = router is not None and not router.closed and router.process.alive
        if router is None or not there or self.process.stopped or not network.connected(self.host, router.host):
            if there or self.process.stopped:
                self.retry_s = min(2 * self.retry_s, _MAX_RECONNECT_S)
                self.try_soon(self.retry_s)
            return  # the next router at this address calls
        self.retry_s = _RECONNECT_S
        self._join(router)

    def _join(self, router: "FakeSocket") -> None:
        network = self.board.network
        connection = Connection(
            self, router, Pipe(network, self.host, router.host), Pipe(network, router.host, self.host)
        )
        before = router.peers.get(self.identity)
        if before is not None:
            before.taken_over = True
            self.board.check_links(after_s=_HEARTBEAT_S)
        router.peers[self.identity] = connection
        self.connection = connection
        while self.unsent:
            self._transmit(connection, self.unsent.popleft())
        _release(self.writers)

    async def send_multipart(self, frames: Sequence[Any], *, flags: int = 0, copy: bool = True) -> None:
        """Raises zmq.Again and zmq.ZMQError as ZeroMQ would."""
        parts = [bytes(frame) for frame in frames]
        if self.kind == zmq.ROUTER:
            self._route(parts)
            return
        while self._is_full():
            waiter = asyncio.get_running_loop().create_future()
            self.writers.append(waiter)
            await waiter
        if self.connection is None:
            self.unsent.append(parts)
        else:
            self._transmit(self.connection, parts)

    def _is_full(self) -> bool:
        if self.connection is None:
            return len(self.unsent) >= _QUEUED
        return self.connection.there.under_way >= 2 * _QUEUED

    def _route(self, parts: list[bytes]) -> None:
        connection = self.peers.get(parts[0])
        if connection is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH, "Host unreachable")
        if connection.back.under_way + len(connection.dealer.arrived) >= 2 * _QUEUED:
            raise zmq.Again
        self._pass(connection.back, connection.dealer, parts[1:])

    def _transmit(self, connection: Connection, parts: list[bytes]) -> None:
        if not connection.taken_over:
            self._pass(connection.there, connection.router, [self.identity, *parts])

    def _pass(self, pipe: Pipe, target: "FakeSocket", parts: list[bytes]) -> None:
        network = self.board.network
        if network.vanished and network.world.random.random() < network.vanished:
            return
        times = 2 if network.doubled and network.world.random.random() < network.doubled else 1
        for _ in range(times):
            pipe.send(lambda: target.take(parts))

    def take(self, parts: list[bytes]) -> None:
        """A message arrives."""
        if self.closed or not self.process.alive:
            return
        self.arrived.append([Frame(memoryview(part)) for part in parts])
        _release(self.readers)
        for dealer in self.board.dealers:
            if dealer.writers and not dealer._is_full():
                _release(dealer.writers)

    async def recv_multipart(self, *, copy: bool = True, flags: int = 0) -> list[Frame]:
        while not self.arrived:
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            waiter = asyncio.get_running_loop().create_future()
            self.readers.append(waiter)
            await waiter
        return self.arrived.popleft()


def _release(waiting: "deque[asyncio.Future[None]]") -> None:
    while waiting:
        waiter = waiting.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return


class Watch:
    """Stands for the watches of connections, which read monitors of real sockets."""

    trouble: str | None = None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def delivered(self, source: int) -> None:
        """Has counted nothing."""

    def close(self) -> None:
        """Has nothing to close."""


def open_socket(kind: int, limits: object) -> tuple[None, FakeSocket]:
    """Stands for `services.zmq.sockets._open`."""
    world = active()
    assert isinstance(world.current, Process)
    return None, FakeSocket(kind, world.part(Switchboard), world.current)


def close_socket(context: object, socket: FakeSocket) -> None:
    """Stands for `services.zmq.sockets._close`."""
    socket.close()
