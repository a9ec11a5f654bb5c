"""The data-parallel ranks of one learner: who they are, how rank 0 starts the others, how it tells them what to do.

Rank 0 drives. The others wait in `CommandChannel.receive` for a line of text in the ranks' store, which unlike a
collective may take as long as it likes, and answer by taking part in the collectives of what they were told.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from services.process import parent_death_signal

Action = Literal["train_step", "outputs", "reference", "host_copy", "probe", "save", "load", "stop"]
LOOPBACK = "127.0.0.1"
_POLL = timedelta(seconds=20)


@dataclass(frozen=True)
class Ranks:
    """This process's place among the learner's ranks."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    address: str = LOOPBACK
    port: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which drives the others."""
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
    )


@dataclass
class Followers:
    """Ranks 1 to N-1, as children of rank 0; they die with it."""

    ranks: Ranks
    listener: socket.socket | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def failed(self) -> int | None:
        """The rank of a child that has ended with an error, if any has."""
        return next((rank for rank, child in enumerate(self.processes, start=1) if child.poll() not in (None, 0)), None)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Waits until the children, told to stop, have ended, and kills those that have not after `timeout_s`."""
        for child in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=timeout_s)
            if child.poll() is None:
                child.kill()
                child.wait()


def start_followers(argv: Sequence[str], *, count: int) -> Followers:
    """Starts ranks 1 to `count` - 1 on this host with the command `argv`, and returns rank 0's place.

    The children find their place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Rank 0 listens on a
    free loopback port before they start, so that none can miss it.
    """
    if count == 1:
        return Followers(ranks=Ranks())
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    followers = Followers(ranks=Ranks(count=count, port=port), listener=listener)
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


@dataclass(frozen=True)
class Command:
    """What rank 0 tells the others to join in. `path` for save and load, `version` for a training step."""

    action: Action
    version: int = 0
    path: str = ""


class CommandChannel:
    """Numbered lines in the store of the ranks; every rank reads each once."""

    def __init__(self, store: Store, *, ranks: Ranks) -> None:
        self._store = store
        self._ranks = ranks
        self._next = 0

    def send(self, command: Command) -> None:
        """Rank 0 only: tells every other rank."""
        assert self._ranks.leads, "only rank 0 gives commands"
        if self._ranks.count > 1:
            self._store.set(f"command/{self._next}", json.dumps(vars(command)))
            self._next += 1

    def receive(self) -> Command:
        """The next command. Waits as long as rank 0 lives; raises torch.distributed.DistError once it is gone."""
        key = f"command/{self._next}"
        while True:
            try:
                self._store.wait([key], _POLL)
                break
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise
        self._next += 1
        command = Command(**json.loads(self._store.get(key)))
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
    store: Store
    if ranks.count == 1:
        store = HashStore()
    else:
        hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            ranks.address,
            ranks.port,
            world_size=ranks.count,
            is_master=ranks.leads and not hosted_elsewhere,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    if ranks.address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore("ranks", store),
        rank=ranks.rank,
        world_size=ranks.count,
        timeout=timeout,
    )
    return CommandChannel(PrefixStore("headway", store), ranks=ranks)


def close_process_group() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
