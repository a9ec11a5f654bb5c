"""The network between hosts: delay, bandwidth, links that are cut in one direction or both, and what dies with them.

Connections are like TCP's: in order, and nothing is lost while they last. What is sent over a cut link is held until
the link is whole again, unless somebody gave the connection up meanwhile. A lost packet is sent again, which holds up
its connection and no other: what is sent over another one, later, may come first.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.world.clock import World

_RETRANSMISSIONS_S = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Delays until a lost packet has arrived after all, as TCP sends it again: doubled each time that it is lost."""


@dataclass(frozen=True)
class LinkRates:
    """Of one direction of a link: seconds of delay and the most that chance adds, and bytes a second of bulk data."""

    delay_s: float = 0.002
    jitter_s: float = 0.004
    bulk_bytes_per_s: float = 1e9


@dataclass
class Network:
    """Links between hosts. `doubled` is the share of messages that arrive twice where the protocol above allows for it,
    `vanished` that of those which never do though the connection lasts, `lost` that of packets which have to be sent
    again, `stale` that of requests which are served though their client had left before they came.
    """

    world: World
    rates: LinkRates = field(default_factory=LinkRates)
    doubled: float = 0.0
    vanished: float = 0.0
    lost: float = 0.0
    stale: float = 0.0
    slowness: dict[str, float] = field(default_factory=dict)
    """By host: how many times longer everything takes to and from it."""
    _cut: dict[tuple[str, str], int] = field(default_factory=dict)
    _held: dict[tuple[str, str], list[Callable[[], object]]] = field(default_factory=dict)
    _uplink_free_at: dict[str, float] = field(default_factory=dict)

    def reaches(self, source: str, target: str) -> bool:
        """True if what one host sends arrives at the other now."""
        return not self._cut.get((source, target))

    def connected(self, one: str, other: str) -> bool:
        """True if both directions are whole."""
        return self.reaches(one, other) and self.reaches(other, one)

    def cut(self, source: str, target: str) -> None:
        """Holds what is sent in this direction from now on."""
        self._cut[source, target] = self._cut.get((source, target), 0) + 1

    def mend(self, source: str, target: str) -> None:
        """The direction is whole again, once each cut of it is mended: what was held arrives."""
        left = self._cut.get((source, target), 0) - 1
        if left > 0:
            self._cut[source, target] = left
            return
        self._cut.pop((source, target), None)
        for deliver in self._held.pop((source, target), ()):
            self.world.after(self.delay(source, target), deliver)

    def delay(self, source: str, target: str) -> float:
        """Seconds that a small message takes now."""
        slow = max(self.slowness.get(source, 1.0), self.slowness.get(target, 1.0))
        return slow * (self.rates.delay_s + self.world.random.random() * self.rates.jitter_s)

    def held_up_s(self) -> float:
        """Seconds by which a message is late because a packet of it was lost; mostly none."""
        random = self.world.random
        return random.choice(_RETRANSMISSIONS_S) if self.lost and random.random() < self.lost else 0.0

    def bulk_s(self, source: str, size: int) -> float:
        """Seconds until so many bytes of bulk data have left a host, behind what it sends already."""
        now = self.world.now
        begin = max(now, self._uplink_free_at.get(source, 0.0))
        self._uplink_free_at[source] = begin + size / self.rates.bulk_bytes_per_s
        return self._uplink_free_at[source] - now


@dataclass
class Pipe:
    """A direction of one connection: in order, and silent once it is closed."""

    network: Network
    source: str
    target: str
    open: bool = True
    _last: float = 0.0
    under_way: int = 0
    _sent: deque[Callable[[], object]] = field(default_factory=deque)
    """Messages under way, oldest first: each arrival delivers the oldest, as a cut link may hold some back."""

    def send(self, deliver: Callable[[], object], *, after_s: float = 0.0) -> None:
        """Has `deliver` called at the other end, after all that was sent before."""
        self.under_way += 1
        self._sent.append(deliver)
        network = self.network
        late_s = after_s + network.held_up_s() + network.delay(self.source, self.target)
        when = max(self._last, network.world.now + late_s)
        self._last = when
        network.world.at(when, self._arrive)

    def _arrive(self) -> None:
        self.under_way -= 1
        if not self.open:
            return
        network = self.network
        if not network.reaches(self.source, self.target):
            self.under_way += 1
            network._held.setdefault((self.source, self.target), []).append(self._arrive)
            return
        self._sent.popleft()()

    def close(self) -> None:
        """Closes; what is under way is lost."""
        self.open = False
        self._sent.clear()
