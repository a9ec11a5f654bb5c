"""A worker's end of the broadcast: a rank of the learner's private process group. Nothing in it is vLLM's.

The group is built from a TCPStore of its own, never from torch's default group: the engine has one already, and a group
of ours has to be thrown away after any failure. It is pinned to the local address that reaches the store's host.
"""

import datetime
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from generator.weights.plan import WeightSyncError
from protocol.fleet import MEETING_BYTES, JoinGroup, group_name
from services.collective_errors import in_plain_words
from services.nccl import environment_of_nccl, failure_of
from services.network import local_address, wait_for_listener

# torch's stubs lack the parts of these classes that are used here.
c10d: Any = dist
NCCL_POLL_S = 0.001


class BroadcastRank:
    """A rank of a sender's group, or of that for this worker's slices. The constructor returns when all ranks have
    joined, or raises WeightSyncError.
    """

    def __init__(self, *, spec: JoinGroup, worker_rank: int, device: torch.device, sender: int = 0) -> None:
        self._spec = spec
        self._name = group_name(spec.epoch, sender, worker_rank if spec.sliced else None)
        self.device = device if spec.backend == "nccl" else torch.device("cpu")
        """Device on which the group receives: gloo's is host memory, whatever the worker computes on."""
        self._timeout = datetime.timedelta(seconds=spec.bucket_timeout_s)
        self._meet_timeout = datetime.timedelta(seconds=spec.meet_timeout_s)
        try:
            self._group = self._join(rank=spec.rank_offset + (0 if spec.sliced else worker_rank))
            if spec.backend == "nccl":
                self._meet()
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"could not join group {spec.epoch} of {spec.world_size} at {spec.host}:{spec.port}: "
                f"{in_plain_words(error)}"
            ) from error

    def receive(self, *, buffer: torch.Tensor, index: int) -> None:
        """Fill `buffer` (uint8, on the group's device) from rank 0. Raises WeightSyncError after the timeout."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        try:
            work = self._group.broadcast([buffer], options)
            self._wait(work, timeout_s=self._spec.bucket_timeout_s)
        except RuntimeError as error:
            raise WeightSyncError(
                f"bucket {index} did not arrive (it has {self._spec.bucket_timeout_s:g} s): {in_plain_words(error)}"
            ) from error

    def _join(self, *, rank: int) -> Any:
        spec = self._spec
        wait_for_listener(host=spec.host, port=spec.port, timeout_s=spec.meet_timeout_s)
        store = c10d.TCPStore(spec.host, spec.port, spec.world_size, is_master=False, timeout=self._meet_timeout)
        prefixed = c10d.PrefixStore(self._name, store)
        if spec.backend == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._meet_timeout
            with environment_of_nccl(timeout_s=spec.meet_timeout_s):
                return c10d.ProcessGroupNCCL(prefixed, rank, spec.world_size, options)
        gloo = c10d.ProcessGroupGloo._Options()
        gloo._timeout = self._meet_timeout
        gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=local_address(host=spec.host, port=spec.port))]
        return c10d.ProcessGroupGloo(prefixed, rank, spec.world_size, gloo)

    def _meet(self) -> None:
        """NCCL connects at the first broadcast, and not when the group is made: a tiny one belongs to the meeting."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        token = torch.zeros(MEETING_BYTES, dtype=torch.uint8, device=self.device)
        with environment_of_nccl(timeout_s=self._spec.meet_timeout_s):
            work = self._group.broadcast([token], options)
        self._wait(work, timeout_s=self._spec.meet_timeout_s)

    def _wait(self, work: "dist.Work", *, timeout_s: float) -> None:
        if self.device.type == "cpu":
            work.wait(self._timeout)
            return
        # NCCL's own wait blocks a stream and not this thread, and its watchdog would end the process.
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()  # its kernel would wait on the GPU for ever
                raise RuntimeError("timed out")
            time.sleep(NCCL_POLL_S)
        if failure := failure_of(work):
            self._group.abort()
            raise RuntimeError(failure)
        work.synchronize()


class BroadcastRanks:
    """A worker's ranks in the groups of all senders. Over gloo these are received from at once, each in a thread;
    over NCCL in one thread, since two communicators that run at the same time on one GPU, begun in another order on
    another, wait for each other for ever.
    """

    def __init__(self, *, spec: JoinGroup, worker_rank: int, device: torch.device) -> None:
        def join(sender: int) -> BroadcastRank:
            return BroadcastRank(spec=spec, worker_rank=worker_rank, device=device, sender=sender)

        self.at_once = spec.backend != "nccl"
        """True if a thread may receive from each sender."""
        if spec.senders == 1 or not self.at_once:
            self._ranks: Sequence[BroadcastRank] = [join(sender) for sender in range(spec.senders)]
        else:
            with ThreadPoolExecutor(spec.senders, thread_name_prefix="headway-join") as threads:
                self._ranks = list(threads.map(join, range(spec.senders)))

    @property
    def device(self) -> torch.device:
        """As of a `BroadcastRank`."""
        return self._ranks[0].device

    def receive(self, *, buffer: torch.Tensor, index: int, sender: int) -> None:
        """Fills `buffer` from a sender. Raises WeightSyncError after the timeout, or for one that there is not."""
        if sender >= len(self._ranks):
            raise WeightSyncError(f"bucket {index} is of sender {sender}, and this worker met {len(self._ranks)}")
        self._ranks[sender].receive(buffer=buffer, index=index)
