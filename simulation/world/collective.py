"""Process groups in memory, for both ends of the weight plane: they meet, broadcast, time out, and die together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from learner.weights.process_group import ProcessGroupError
from simulation.world.clock import active
from simulation.world.network import Network
from simulation.world.process import Process
from simulation.world.threads import current_thread

_FIRST_PORT = 20_000


class Collectives:
    """The groups that form, by the port of their meeting."""

    def __init__(self, network: Network, *, bucket_s: float = 0.01) -> None:
        self.network = network
        self.bucket_s = bucket_s
        self.groups: dict[int, CollectiveGroup] = {}
        self._next_port = _FIRST_PORT

    def open(self, owner: Process, *, world_size: int) -> "CollectiveGroup":
        """A place to meet, of which the caller is rank 0."""
        self._next_port += 1
        group = self.groups[self._next_port] = CollectiveGroup(self, owner, world_size=world_size, port=self._next_port)
        return group


@dataclass(eq=False)
class CollectiveGroup:
    """Rank 0 and the workers that came. It breaks for all when one of them dies or is out of reach for too long."""

    collectives: Collectives
    owner: Process
    world_size: int
    port: int
    members: list["CollectiveMember"] = field(default_factory=list)
    sent: int = 0
    broken: bool = False
    changed: list[Callable[[], object]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if all have come."""
        return len(self.members) == self.world_size - 1

    def tell(self) -> None:
        """Wakes all who wait for a change."""
        waiting, self.changed = self.changed, []
        for wake in waiting:
            wake()

    def break_off(self) -> None:
        """No more broadcasts."""
        if not self.broken:
            self.broken = True
            self.collectives.groups.pop(self.port, None)
            self.tell()


@dataclass(eq=False)
class CollectiveMember:
    """A worker's end. `bucket` is the one that has arrived, `taken` how many it has had."""

    group: CollectiveGroup
    process: Process
    bucket: torch.Tensor | None = None
    waiting: bool = False
    taken: int = 0

    @property
    def reachable(self) -> bool:
        """True if a broadcast gets to it now."""
        here = self.process.alive and not self.process.stopped
        return here and self.group.collectives.network.connected(self.group.owner.host, self.process.host)


async def wait(group: CollectiveGroup, condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """In an event loop: whether the condition came true in time, with the group whole."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    while not condition():
        if group.broken or loop.time() >= ends_at:
            return False
        future = loop.create_future()
        group.changed.append(lambda future=future: loop.call_soon(_settle, future))  # type: ignore[misc]
        timer = loop.call_at(ends_at, _settle, future)
        await future
        timer.cancel()
    return True


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def block(group: CollectiveGroup, condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """The same in a thread."""
    thread, world = current_thread(), active()
    assert thread is not None, "a collective blocks"
    ends_at = world.now + timeout_s
    while not condition():
        if group.broken or world.now >= ends_at:
            return False
        woken = _Once(thread.wake)
        group.changed.append(woken)
        world.at(ends_at, woken)
        thread.block()
    return True


class _Once:
    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class FakeMeeting:
    """Stands for learner.weights.plane.Meeting."""

    def __init__(self, *, host: str, epoch: int, world_size: int, timeout_s: float, **_: object) -> None:
        world = active()
        assert isinstance(world.current, Process)
        self.host, self.epoch, self.world_size, self._timeout_s = host, epoch, world_size, timeout_s
        self._group = world.part(Collectives).open(world.current, world_size=world_size)
        self.port = self._group.port
        world.current.deaths.append(self._group.break_off)

    def join(self, *, backend: str, **_: object) -> "FakeBroadcastGroup":
        """See Meeting."""
        if not block(self._group, lambda: self._group.complete, timeout_s=self._timeout_s):
            came = len(self._group.members)
            self._group.break_off()
            raise ProcessGroupError(f"epoch {self.epoch}: {came} of {self.world_size - 1} members met")
        return FakeBroadcastGroup(self._group)


class FakeBroadcastGroup:
    """Stands for learner.weights.plane.BroadcastGroup."""

    def __init__(self, group: CollectiveGroup) -> None:
        self._group = group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, buckets: Sequence[Any], *, timeout_s: float = 10.0, **_: object) -> None:
        """See BroadcastGroup."""
        group = self._group
        for index, bucket in enumerate(buckets):
            thread = current_thread()
            assert thread is not None
            thread.sleep(group.collectives.bucket_s)
            number = group.sent
            if not block(group, lambda: self._taken(bucket.data, number), timeout_s=timeout_s):  # noqa: B023 - done with by then
                group.break_off()
                raise ProcessGroupError(f"bucket {index + 1} of {len(buckets)} was not taken by all")
            group.sent += 1

    def _taken(self, data: torch.Tensor, number: int) -> bool:
        """Gives the bucket to whoever waits for it and is in reach."""
        for member in self._group.members:
            if member.taken == number and member.waiting and member.bucket is None and member.reachable:
                member.bucket = data
                self._group.tell()
        return all(member.taken > number for member in self._group.members)

    def close(self) -> None:
        """See BroadcastGroup."""
        self._group.break_off()
