"""Between env_services and the learner: passes every ZeroMQ message on, and writes down what both have said.

    env_service e1 ─DEALER e1─▶ ROUTER  tap  DEALER e1 ─▶ ROUTER learner
    env_service e2 ─DEALER e2─▶              DEALER e2 ─▶

What the learner has acknowledged is known from here, and not from its own books. Messages can be lost, doubled, held
back and damaged on the way.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import zmq

from protocol.codec import ProtocolError, decode
from protocol.messages import FailedLease, FinishedLease, LeaseGrant, Message, OutcomeReceipt
from tests.chaos.journal_reader import Place

Direction = Literal["up", "down"]
Action = Literal["drop", "duplicate", "delay", "corrupt"]
_QUEUED = 1000
_DOUBT_S = 3.0


@dataclass(frozen=True, order=True)
class AttemptKey:
    """Key of an attempt at a lease. `incarnation` is 0 where the messages carry none."""

    incarnation: int
    lease_id: int
    attempt: int


@dataclass(frozen=True)
class SeenGrant:
    """The learner granted a training lease."""

    at: float
    env: str
    key: AttemptKey


@dataclass(frozen=True)
class Finish:
    """An env_service sent a training group; `stamps` are the processes and versions on its sampled tokens."""

    at: float
    env: str
    key: AttemptKey
    stamps: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Failure:
    """An env_service gave a training lease up."""

    at: float
    env: str
    key: AttemptKey
    reason: str


@dataclass(frozen=True)
class Acknowledgement:
    """The learner acknowledged a training attempt, when the journal reached up to `journal_end`."""

    at: float
    env: str
    key: AttemptKey
    journal_end: Place
    doubtful: bool = False


TapRecord = SeenGrant | Finish | Failure | Acknowledgement


@dataclass
class Disturbance:
    """A change to the next `times` messages of these kinds, or to those that `only` picks of them."""

    direction: Direction
    action: Action
    kinds: Collection[str]
    times: int
    delay_s: float = 0.0
    only: Callable[[Message], bool] = lambda message: True

    def takes(self, direction: Direction, message: Message | None) -> bool:
        wanted = self.times > 0 and direction == self.direction and message is not None and message.kind in self.kinds
        wanted = wanted and message is not None and self.only(message)
        self.times -= wanted
        return wanted


@dataclass
class MessageTally:
    """Messages by what became of them."""

    passed: int = 0
    disturbed: int = 0
    not_taken: int = 0


class LeaseTap:
    """The tap's sockets and records; a context manager. `port` is for env_services."""

    def __init__(self, *, learner_port: Callable[[], int], journal_end: Callable[[], Place]) -> None:
        self._learner_port = learner_port
        self._journal_end = journal_end
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.LINGER, 0)):
            self._router.setsockopt(option, value)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._router.setsockopt(option, _QUEUED)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._late: list[tuple[float, Direction, bytes, list[bytes]]] = []
        self._disturbances: list[Disturbance] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-tap", daemon=True)
        self.records: list[TapRecord] = []
        self.doubts: list[tuple[float, float]] = []
        self.tally = MessageTally()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for socket in (self._router, *self._dealers.values()):
            socket.close(linger=0)
        self._context.term()

    def disturb(self, disturbance: Disturbance) -> None:
        """From now on, until its `times` are used up."""
        self._disturbances.append(disturbance)

    def doubt(self, *, for_s: float) -> None:
        """Bytes are changed from now on, for so long: what is then acknowledged may not be what was sent.

        Messages have no checksum of their own, so that a changed token or lease id can look like a good one.
        """
        now = time.monotonic()
        self.doubts.append((now, now + for_s + _DOUBT_S))

    def calm(self) -> None:
        """No disturbance any more."""
        self._disturbances.clear()

    def _run(self) -> None:
        while not self._stop.is_set():
            poller = zmq.Poller()
            for socket in (self._router, *self._dealers.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(timeout=20))
            if self._router in ready:
                self._drain_router()
            for identity, dealer in list(self._dealers.items()):
                if dealer in ready:
                    self._drain_dealer(identity, dealer)
            self._send_late()

    def _drain_router(self) -> None:
        for _ in range(100):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take("up", identity, frames)

    def _drain_dealer(self, identity: bytes, dealer: "zmq.Socket[bytes]") -> None:
        for _ in range(100):
            if dealer.closed:  # its env_service turned out to be gone
                return
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take("down", identity, frames)

    def _take(self, direction: Direction, identity: bytes, frames: list[bytes]) -> None:
        message = _decoded(frames)
        if message is not None:
            self._write_down(identity.decode("latin-1"), message)
        taken = [one for one in self._disturbances if one.takes(direction, message)]
        self.tally.disturbed += bool(taken)
        actions = {one.action for one in taken}
        if "corrupt" in actions:
            self.doubt(for_s=0.0)
            frames = _damaged(frames)
        if "delay" in actions:
            due = time.monotonic() + max(one.delay_s for one in taken)
            self._late.append((due, direction, identity, frames))
        elif "drop" not in actions:
            for _ in range(2 if "duplicate" in actions else 1):
                self._pass_on(direction, identity, frames)

    def _send_late(self) -> None:
        now = time.monotonic()
        due = [one for one in self._late if one[0] <= now]
        self._late = [one for one in self._late if one[0] > now]
        for _, direction, identity, frames in due:
            self._pass_on(direction, identity, frames)

    def _pass_on(self, direction: Direction, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            if direction == "up":
                self._dealer(identity).send_multipart(frames, zmq.NOBLOCK)
            else:
                self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
            self.tally.passed += 1
        except zmq.Again:
            self.tally.not_taken += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.tally.not_taken += 1
            self._hang_up(identity)  # the env_service is gone: let the learner see that

    def _hang_up(self, identity: bytes) -> None:
        if dealer := self._dealers.pop(identity, None):
            dealer.close(linger=0)

    def _dealer(self, identity: bytes) -> "zmq.Socket[bytes]":
        if identity not in self._dealers:
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, identity)
            for option, value in (
                (zmq.LINGER, 0), (zmq.SNDHWM, _QUEUED), (zmq.RCVHWM, _QUEUED), (zmq.RECONNECT_IVL, 100),
                (zmq.RECONNECT_IVL_MAX, 1000), (zmq.HEARTBEAT_IVL, 2000), (zmq.HEARTBEAT_TIMEOUT, 10000),
            ):  # fmt: skip
                dealer.setsockopt(option, value)
            dealer.connect(f"tcp://127.0.0.1:{self._learner_port()}")
            self._dealers[identity] = dealer
        return self._dealers[identity]

    def _write_down(self, env: str, message: Message) -> None:
        now = time.monotonic()
        match message:
            case LeaseGrant():
                grants = (lease for lease in message.leases if lease.purpose == "train")
                self.records.extend(SeenGrant(at=now, env=env, key=key_of(lease)) for lease in grants)
            case FinishedLease(group=group) if group.purpose == "train":
                spans = (span for one in group.trajectories for span in one.version_spans)
                stamps = frozenset((span.instance, span.version) for span in spans)
                self.records.append(Finish(at=now, env=env, key=key_of(group), stamps=stamps))
            case FailedLease(purpose="train", reason=reason):
                self.records.append(Failure(at=now, env=env, key=key_of(message), reason=reason))
            case OutcomeReceipt(purpose="train"):
                end = self._journal_end()
                doubtful = any(since <= now <= until for since, until in self.doubts)
                self.records.append(
                    Acknowledgement(at=now, env=env, key=key_of(message), journal_end=end, doubtful=doubtful)
                )


def key_of(holder: object) -> AttemptKey:
    """The attempt that a lease, a group or a message speaks of."""
    return AttemptKey(
        incarnation=int(getattr(holder, "incarnation", 0)),
        lease_id=int(getattr(holder, "lease_id")),  # noqa: B009 - of several types of messages
        attempt=int(getattr(holder, "attempt")),  # noqa: B009
    )


def _decoded(frames: Sequence[bytes]) -> Message | None:
    try:
        return decode(frames)
    except ProtocolError:
        return None


def _damaged(frames: Sequence[bytes]) -> list[bytes]:
    """The frames with one byte of one of them changed."""
    which = random.choice([index for index, frame in enumerate(frames) if frame])
    frame = bytearray(frames[which])
    frame[random.randrange(len(frame))] ^= 0x55
    return [*frames[:which], bytes(frame), *frames[which + 1 :]]
