"""The data-parallel ranks of one learner: who they are, how rank 0 starts the others, how it tells them what to do.

Rank 0 drives. The others wait in `CommandChannel.receive` for a line of text in the ranks' store, which unlike a
collective may take as long as it likes, and answer by taking part in the collectives of what they were told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from learner.training.batch import ARRAY_TYPES, FlatBatch
from services.nccl import interface_of
from services.network import LOOPBACK, local_address
from services.process import StartAgain, parent_death_signal

Action = Literal[
    "train_step", "add_part", "discard_parts", "outputs", "reference", "average", "host_copy", "probe", "sketches",
    "save", "begin_save", "load", "stop", "create_adapter", "remove_adapter", "restore_adapter", "step_adapter",
    "client_round",
]  # fmt: skip
STORE_POLL = timedelta(seconds=20)
"""Longest single wait at the ranks' store, which says nothing of a rank that is late."""
_BEGINS_WITHIN = timedelta(seconds=120)
"""torchrun starts the ranks of all hosts together, and rank 0 says so before anything else that takes long."""
_READ_POLL_S = 0.02
OPENING = "opening"
"""Place of a rank that loads its model: that may keep all of its threads from running."""
_BEGUN = "rank 0 has begun"


@dataclass(frozen=True)
class Ranks:
    """This process's place among the learner's ranks."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    address: str = LOOPBACK
    port: int = 0
    on_host: int = 1
    """Number of ranks on this host."""

    @property
    def leads(self) -> bool:
        """True if this is rank 0, which drives the others."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU where there is none."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks | None:
    """The place that torchrun, or `start_followers`, wrote into the environment; None where neither did."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return Ranks(
        rank=int(environment["RANK"]),
        count=int(environment["WORLD_SIZE"]),
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        address=environment.get("MASTER_ADDR", LOOPBACK),
        port=int(environment["MASTER_PORT"]),
        on_host=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
    )


@dataclass
class Followers:
    """Ranks 1 to N-1, as children of rank 0; they die with it."""

    ranks: Ranks
    listener: socket.socket | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ended(self) -> dict[int, int]:
        """The exit codes of the children that have ended, by rank; -n for signal n."""
        codes = {rank: child.poll() for rank, child in enumerate(self.processes, start=1)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def failed(self) -> int | None:
        """The rank of a child that has ended with an error, if any has."""
        return next((rank for rank, code in self.ended().items() if code != 0), None)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Waits until the children, told to stop, have ended, and kills those that have not after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for child in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.0, deadline - time.monotonic()))
            if child.poll() is None:
                child.kill()
                child.wait()
        if self.listener is not None:
            self.listener.close()  # does nothing once the store has taken it over


def start_followers(argv: Sequence[str], *, count: int) -> Followers:
    """Starts ranks 1 to `count` - 1 on this host with the command `argv`, and returns rank 0's place.

    The children find their place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Rank 0 listens on a
    free loopback port before they start, so that none can miss it.
    """
    if count == 1:
        return Followers(ranks=Ranks())
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    followers = Followers(ranks=Ranks(count=count, port=port, on_host=count), listener=listener)
    parent = os.getpid()
    for rank in range(1, count):
        place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "HEADWAY_PARENT": str(parent),
        }
        followers.processes.append(subprocess.Popen(list(argv), env=environment))
    return followers


def die_with_parent() -> None:
    """Makes the kernel kill this follower when rank 0 ends (Linux); ends it at once if that has happened already."""
    parent = os.environ.get("HEADWAY_PARENT")
    if parent is None:
        return
    parent_death_signal(signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit("the learner's rank 0 has ended")


def is_of_ranks(error: BaseException) -> bool:
    """True if an error is one of a collective among ranks, or of their store, or was raised from one.

    gloo's have no type of their own.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_of_ranks, error.exceptions))
    if isinstance(error, StartAgain) and error.__cause__ is not None:
        return is_of_ranks(error.__cause__)
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "nccl", "processgroup"))
    )


@dataclass(frozen=True)
class RankCommand:
    """A call of rank 0 to the others to join in. `path` for save and load, `version` for a training step, `arguments`
    in JSON for what is done with adapters of clients.

    `is_over` is for a stop: False if rank 0 ends and will be started again, and the other ranks are to be so, too.
    """

    action: Action
    version: int = 0
    path: str = ""
    arguments: str = ""
    is_over: bool = True


class CommandChannel:
    """Numbered lines in the store of the ranks; every rank reads each once."""

    def __init__(self, store: Store, *, ranks: Ranks) -> None:
        self._store = store
        self._ranks = ranks
        self._next = 0
        self._stopped = False
        self.place = OPENING
        """This rank's present work, for whoever asks why it is late."""
        self.is_over: Callable[[], bool] = lambda: True
        """Of rank 0: tells at a stop whether the run is over, and with it the other ranks."""
        self.ended_over = True
        """Of the others: the newest stop's word on it."""

    def another_store(self) -> Store:
        """The ranks' store over a connection of its own: a call that waits holds up all others of a connection."""
        return self._store.clone()  # type: ignore[attr-defined, no-any-return]  # torch's stubs leave it out

    def send(self, command: RankCommand) -> None:
        """Rank 0 only: tells every other rank."""
        assert self._ranks.leads, "only rank 0 gives commands"
        self.place = f"{command.action} {self._next}"
        self._stopped = command.action == "stop"
        if self._ranks.count > 1:
            self._store.set(f"command/{self._next}", json.dumps(vars(command)))
            self._next += 1

    def stop(self, *, read_within_s: float = 0.0) -> None:
        """Rank 0 only: ends the others, unless that was the last command; waits so long, at most, for all to read it.

        A store that this process holds ends with it, and a rank that has not read it yet then has to guess.
        """
        if not self._stopped:
            self.send(RankCommand(action="stop", is_over=self.is_over()))
        last, deadline = f"command/{self._next - 1}", time.monotonic() + read_within_s
        while self._ranks.count > 1 and time.monotonic() < deadline and self._store.check([last]):
            time.sleep(_READ_POLL_S)

    def receive(self) -> RankCommand:
        """The next command. Waits as long as rank 0 lives; raises torch.distributed.DistError once it is gone."""
        key = f"command/{self._next}"
        self.place = f"waiting for command {self._next}"
        while True:
            try:
                self._store.wait([key], STORE_POLL)
                break
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise
        command = RankCommand(**json.loads(self._store.get(key)))
        self.place = f"{command.action} {self._next}"
        if command.action == "stop":
            self.ended_over = command.is_over
        self._next += 1
        # Not every command has collectives, so rank 0 can be several ahead: who reads a line last removes it.
        readers = f"{key}/read"
        if self._store.add(readers, 1) == self._ranks.count - 1:
            self._store.delete_key(key)
            self._store.delete_key(readers)
        return command


def open_process_group(ranks: Ranks, *, timeout_s: float, listener: socket.socket | None = None) -> CommandChannel:
    """Joins the ranks' process group (gloo, and nccl for tensors on GPUs), and returns the channel of commands.

    `listener` is rank 0's listening socket, which the store takes over. Raises torch.distributed.DistError when ranks
    are missing for `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    store = _store(ranks, timeout, listener=listener)
    if not ranks.leads and _by_torchrun():
        _see_it_begun(store)
    if (interface := _interface_to(ranks)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore("ranks", store),
        rank=ranks.rank,
        world_size=ranks.count,
        timeout=timeout,
    )
    return CommandChannel(PrefixStore("headway", store), ranks=ranks)


def say_begun(ranks: Ranks) -> None:
    """Of rank 0, as soon as it can: under torchrun the others wait for no rank 0 that never begins.

    Theirs may have met one that was about to end; what they join then is its successor's store, in which it never
    begins, since that waits for them.
    """
    if ranks.leads and ranks.count > 1 and _by_torchrun():
        _store(ranks, _BEGINS_WITHIN).set(_BEGUN, "1")


def _see_it_begun(store: Store) -> None:
    try:
        store.wait([_BEGUN], _BEGINS_WITHIN)
    except dist.DistStoreError as error:
        raise dist.DistStoreError(
            f"rank 0 has not begun within {_BEGINS_WITHIN.total_seconds():g} s: this host's torchrun met one that has "
            "ended since, and has to be started again"
        ) from error


def _by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(ranks: Ranks, timeout: timedelta, *, listener: socket.socket | None = None) -> Store:
    store: Store
    if ranks.count == 1:
        store = HashStore()
    else:
        store = TCPStore(
            ranks.address,
            ranks.port,
            world_size=ranks.count,
            is_master=ranks.leads and not _by_torchrun(),
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    # torchrun's own store outlives a start of the ranks, and holds what the former ones said.
    return PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _interface_to(ranks: Ranks) -> str | None:
    """The interface on the way to rank 0: gloo itself takes the one that this host's name leads to, often loopback."""
    try:
        return interface_of(local_address(host=ranks.address, port=ranks.port or 1))
    except OSError:
        return None


def share_folder(folder: Path, commands: CommandChannel, *, ranks: Ranks) -> bool:
    """True if all ranks see the same folder, which rank 0 makes if need be. All ranks must call it."""
    if ranks.count == 1:
        return True
    store = commands.another_store()
    if ranks.leads:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f"ranks-{secrets.token_hex(8)}"
        mark.touch()
        store.set("shared", mark.name)
    store.wait(["shared"])
    seen = (folder / store.get("shared").decode()).exists()
    blind = torch.tensor([int(not seen)])
    dist.all_reduce(blind)
    if ranks.leads:  # all have read it
        store.delete_key("shared")
        mark.unlink()
    dist.barrier()
    return int(blind.item()) == 0


def close_process_group() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


Scalar = TypeVar("Scalar", bound=np.generic)


def share_batch(batch: FlatBatch | None) -> FlatBatch:
    """Rank 0 gives its batch, the others None; everybody returns it. All ranks must call it."""
    if dist.get_world_size() == 1:
        assert batch is not None, "rank 0 has the batch"
        return batch
    names = [field.name for field in dataclasses.fields(FlatBatch)]
    given = {} if batch is None else {name: getattr(batch, name) for name in names}
    lengths = np.array([len(given[name]) for name in names], dtype=np.int64) if given else None
    sizes = _broadcast(lengths, len(names), np.dtype("int64")).tolist()
    return FlatBatch(
        **{name: _broadcast(given.get(name), size, ARRAY_TYPES[name]) for name, size in zip(names, sizes, strict=True)}
    )


def _broadcast(values: NDArray[Scalar] | None, size: int, dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
    if size == 0:  # nothing travels: what every rank knows, and gloo need not be asked to send no bytes
        return np.empty(0, dtype=dtype)
    buffer = np.empty(size, dtype=dtype) if values is None else np.ascontiguousarray(values)
    # A view of the array's bytes: the collective writes into it.
    dist.broadcast(torch.from_numpy(buffer.view(np.uint8)), src=0)
    return buffer


def share_bytes(content: bytes | None) -> bytes:
    """Rank 0 gives its bytes, the others None; everybody returns them. All ranks must call it."""
    if dist.get_world_size() == 1:
        assert content is not None, "rank 0 has the bytes"
        return content
    given = None if content is None else np.frombuffer(bytearray(content), dtype=np.uint8)
    size = _broadcast(None if given is None else np.array([len(given)], dtype=np.int64), 1, np.dtype("int64"))
    return _broadcast(given, int(size[0]), np.dtype("uint8")).tobytes()


def share_text(text: str | None) -> str:
    """Rank 0 gives its text, the others None; everybody returns it. All ranks must call it."""
    return share_bytes(None if text is None else text.encode()).decode()


def texts_of_ranks(text: str) -> list[str]:
    """The texts of all ranks in their order, the same on all. All ranks must call it."""
    if rank_count() == 1:
        return [text]
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(rank_count())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    longest = max(int(size) for size in sizes)
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, nn.functional.pad(own, (0, longest - len(own))))
    return [each[: int(size)].numpy().tobytes().decode() for each, size in zip(found, sizes, strict=True)]


def rank() -> int:
    """This process's number among the ranks; 0 of a process without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def rank_count() -> int:
    """Number of ranks. A process without a group is the only one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def summed_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, in place; the same on all. All ranks must call it with the same shape."""
    if rank_count() > 1:
        dist.all_reduce(values)
    return values


def any_rank(flag: bool) -> bool:
    """True on all ranks if `flag` is true on any. All ranks must call it."""
    return last_rank(flag) is not None


def last_rank(flag: bool) -> int | None:
    """The highest rank that says so, None if none does; the same answer on all. All ranks must call it."""
    if dist.get_world_size() == 1:
        return 0 if flag else None
    votes = torch.tensor([dist.get_rank() if flag else -1])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    found = int(votes.item())
    return None if found < 0 else found


def raise_on_all(error: OSError | None, *, directory: Path, did: str = "write") -> None:
    """Raises on every rank if any rank has an error of its disk: its own, or one that names the other rank.

    `did` is what it could not do to its part of `directory`. All ranks must call it; nobody waits for a rank that has
    failed alone.
    """
    failed = last_rank(error is not None)
    if error is not None:
        raise error
    if failed is not None:
        raise OSError(errno.EIO, f"rank {failed} could not {did} its part of {directory}: its own log says why")
