"""Copies of the weights for sending: whole on rank 0, or shared, where each rank keeps some of the weights.

    rank 0      tell ─▶ give and get parts, keep its own weights ─▶ snapshot, which names the others' shares
    the others  ◀────── the same, in the same order ─▶ keep their own ─▶ `RankSender`, which hashes and sends them

A copy that rank 0 has let go of is forgotten by the others when the next one is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

from learner.training.adapters import merged_weights
from learner.training.config import Dtype
from learner.training.owned_weights import PartsModel, owned_weights
from learner.training.policy import WeightPart, WeightSnapshot, host_copy, torch_dtype
from learner.training.ranks import CommandChannel, Ranks
from learner.training.shards import whole_size
from learner.weights.process_group import Rooms
from learner.weights.rank_sender import RankCopies, RankSender, SenderPlace, sender_place
from learner.weights.senders import CopyShare, CopyTicket
from services.network import LOOPBACK, local_address


@dataclass(frozen=True)
class CopyOrder:
    """A copy that all ranks are told to make: of buckets of about so many bytes, 0 for none. A `shared` one has a
    number, and says which of the former ones are still `wanted`. A `mapped` one, all of it rank 0's, lies in memory
    that generators of its host can map.
    """

    part: WeightPart = "merged"
    bucket_bytes: int = 0
    shared: bool = False
    number: int = 0
    wanted: Sequence[int] = ()
    mapped: bool = False

    def to_text(self) -> str:
        """For a command to the other ranks."""
        return json.dumps(vars(self))

    @classmethod
    def from_text(cls, text: str) -> CopyOrder:
        """As it was told."""
        return cls(**json.loads(text))


def spread(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank that keeps each weight: the largest first, to whoever has least so far. The same on every rank."""
    loads = [0] * ranks
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        owners[name] = rank = loads.index(min(loads))
        loads[rank] += sizes[name]
    return owners


class SharedCopies:
    """Makes copies of the weights of `engine`, on every rank."""

    def __init__(self, engine: PartsModel, *, dtype: Dtype, ranks: Ranks, commands: CommandChannel) -> None:
        self._engine = engine
        self._dtype = dtype
        self._ranks = ranks
        self._commands = commands
        self._rooms, self._mapped_rooms = Rooms(), Rooms(shared=True)
        self._kept = RankCopies()
        self._sender: RankSender | None = None
        self._places: dict[int, SenderPlace] = {}
        self._tickets: WeakSet[CopyTicket] = WeakSet()
        self._numbers = 0
        weight_bytes = torch_dtype(dtype).itemsize
        self._sizes = {
            weight.name: whole_size(weight.parameter) * weight_bytes for weight in merged_weights(engine.model)
        }
        self._owners = spread(self._sizes, ranks.count)

    def order(self, *, bucket_bytes: int, part: WeightPart, shared: bool, mapped: bool = False) -> CopyOrder:
        """Of rank 0: the next copy, which the others are to be told of. Adapters are small, and rank 0's alone."""
        if not shared or self._ranks.count == 1 or part == "adapter":
            return CopyOrder(part=part, bucket_bytes=bucket_bytes, mapped=mapped)
        self._numbers += 1
        wanted = [ticket.number for ticket in self._tickets]
        return CopyOrder(part=part, bucket_bytes=bucket_bytes, shared=True, number=self._numbers, wanted=wanted)

    def take(self, order: CopyOrder) -> WeightSnapshot:
        """This rank's part of a copy. Rank 0 has all of one that is not shared, and the others none.

        Of the others a shared one can be sent from here on: rank 0 may ask for it as soon as it has met them again.
        """
        kept = self._mapped_rooms if order.mapped else self._rooms
        rooms = kept if order.bucket_bytes and order.part != "base" else None  # a base is copied once
        if order.shared and not self._ranks.leads:
            self._open_sender()
            self._kept.keep_only(order.wanted)
        copy = host_copy(
            self._engine,
            dtype=self._dtype,
            keep=order.shared or self._ranks.leads,
            bucket_bytes=order.bucket_bytes,
            rooms=rooms,
            part=order.part,
            owned=owned_weights(self._engine, self._owners, dtype=torch_dtype(self._dtype), part=order.part)
            if order.shared
            else None,
            buffers=self._ranks.leads,
        )
        if order.shared and not self._ranks.leads:
            self._kept.put(order.number, copy.buckets)
        return copy

    def with_shares(self, order: CopyOrder, copy: WeightSnapshot) -> WeightSnapshot:
        """Rank 0's part of a copy that is shared, with what it needs to ask the others for theirs."""
        if not order.shared or not self._ranks.leads:
            return copy
        ticket = CopyTicket(order.number)
        self._tickets.add(ticket)
        shares = [
            CopyShare(rank=rank, nbytes=self._bytes_of(rank), place=self._place(rank), ticket=ticket)
            for rank in range(1, self._ranks.count)
        ]
        return replace(copy, shares=tuple(shares))

    def close(self) -> None:
        """Ends this rank's sender."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _bytes_of(self, rank: int) -> int:
        return sum(self._sizes[name] for name, owner in self._owners.items() if owner == rank)

    def _open_sender(self) -> None:
        if self._sender is None:
            try:
                host = local_address(host=self._ranks.address, port=self._ranks.port or 1)
            except OSError:
                host = LOOPBACK
            self._sender = RankSender(self._kept, rank=self._ranks.rank, host=host)
            self._sender.register(self._commands.another_store())

    def _place(self, rank: int) -> SenderPlace:
        if rank not in self._places:
            self._places[rank] = sender_place(self._commands.another_store(), rank=rank)
        return self._places[rank]
