"""The receiving end of a private torch.distributed process group.

The group is built from a TCPStore of its own, never from torch's default group: the engine has one already, and a group
of ours has to be thrown away after any failure. It is pinned to the local address that reaches the store's host.
"""

import datetime
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from generator.weight_plan import WeightSyncError
from protocol.fleet import JoinGroup

# torch's stubs lack the parts of these classes that are used here.
c10d: Any = dist
NCCL_POLL_S = 0.001


class BroadcastGroup:
    """One rank of the group. The constructor returns when all ranks have joined, or raises WeightSyncError."""

    def __init__(self, *, spec: JoinGroup, worker_rank: int, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._timeout = datetime.timedelta(seconds=spec.bucket_timeout_s)
        self._meet_timeout = datetime.timedelta(seconds=spec.meet_timeout_s)
        try:
            self._group = self._join(rank=spec.rank_offset + worker_rank)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"could not join group {spec.epoch} of {spec.world_size} at {spec.host}:{spec.port}: {error}"
            ) from error

    def receive(self, *, buffer: torch.Tensor, index: int) -> None:
        """Fill `buffer` (uint8, on the group's device) from rank 0. Raises WeightSyncError after the timeout."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        try:
            work = self._group.broadcast([buffer], options)
            self._wait(work)
        except RuntimeError as error:
            raise WeightSyncError(
                f"bucket {index} did not arrive within {self._spec.bucket_timeout_s} s: {error}"
            ) from error

    def _join(self, *, rank: int) -> Any:
        spec = self._spec
        store = c10d.TCPStore(spec.host, spec.port, spec.world_size, is_master=False, timeout=self._meet_timeout)
        prefixed = c10d.PrefixStore(f"headway-{spec.epoch}", store)
        if spec.backend == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._meet_timeout
            return c10d.ProcessGroupNCCL(prefixed, rank, spec.world_size, options)
        gloo = c10d.ProcessGroupGloo._Options()
        gloo._timeout = self._meet_timeout
        gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=local_address(host=spec.host, port=spec.port))]
        return c10d.ProcessGroupGloo(prefixed, rank, spec.world_size, gloo)

    def _wait(self, work: "dist.Work") -> None:
        if self._device.type == "cpu":
            work.wait(self._timeout)
            return
        # NCCL's own wait blocks a stream and not this thread, and its watchdog would end the process.
        deadline = time.monotonic() + self._spec.bucket_timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(NCCL_POLL_S)
        work.synchronize()


def local_address(*, host: str, port: int) -> str:
    """The address of this machine's interface that reaches `host`. Sends nothing. Raises OSError without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
