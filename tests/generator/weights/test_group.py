"""A worker's end of the broadcast, without vLLM, and what NCCL says of a collective that failed."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from generator.weights.group import BroadcastRank, BroadcastRanks
from generator.weights.plan import WeightSyncError
from learner.weights.process_group import Meeting, MeetingElsewhere, pack_buckets
from protocol.fleet import JoinGroup
from services.network import LOOPBACK

TIMEOUT_S = 10.0


@contextmanager
def joined() -> Iterator[tuple[Any, BroadcastRank]]:
    """The learner's group over gloo, and the rank of a worker."""
    meeting = Meeting(host=LOOPBACK, epoch=1, world_size=2, timeout_s=TIMEOUT_S)
    spec = JoinGroup(
        epoch=1, backend="gloo", host=LOOPBACK, port=meeting.port, rank_offset=1, world_size=2,
        meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        rank = threads.submit(BroadcastRank, spec=spec, worker_rank=0, device=torch.device("cpu"))
        with meeting.join(backend="gloo") as group:
            yield group, rank.result(TIMEOUT_S)


def test_it_takes_a_bucket_and_loads_no_vllm() -> None:
    bucket = pack_buckets([("weight", torch.arange(100.0))], bucket_bytes=1 << 20)[0]
    buffer = torch.empty(bucket.spec.nbytes, dtype=torch.uint8)
    with joined() as (group, rank), ThreadPoolExecutor(1) as threads:
        sent = threads.submit(group.send, [bucket], timeout_s=TIMEOUT_S)
        rank.receive(buffer=buffer, index=0)
        sent.result(TIMEOUT_S)
    assert torch.equal(buffer, bucket.data)
    asked = "import sys, generator.weights.group; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False, timeout=60).returncode == 0


def test_it_takes_from_two_senders_in_whatever_order_and_refuses_a_third() -> None:
    meeting = Meeting(host=LOOPBACK, epoch=4, world_size=2, timeout_s=TIMEOUT_S)
    other = MeetingElsewhere(
        host=LOOPBACK, port=meeting.port, epoch=4, sender=1, world_size=2, timeout_s=TIMEOUT_S
    )  # fmt: skip
    spec = JoinGroup(
        epoch=4, backend="gloo", host=LOOPBACK, port=meeting.port, rank_offset=1, world_size=2, senders=2,
        meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    buckets = [pack_buckets([("w", torch.arange(100.0) + sender)], bucket_bytes=1 << 20)[0] for sender in range(2)]
    with ThreadPoolExecutor(4) as threads:
        joining = threads.submit(BroadcastRanks, spec=spec, worker_rank=0, device=torch.device("cpu"))
        second = threads.submit(other.join, backend="gloo")
        with meeting.join(backend="gloo") as first, second.result(TIMEOUT_S) as second_group:
            ranks = joining.result(TIMEOUT_S)
            sent = [
                threads.submit(group.send, [bucket], timeout_s=TIMEOUT_S)
                for group, bucket in zip((first, second_group), buckets, strict=True)
            ]
            for sender in (1, 0):
                buffer = torch.empty(buckets[sender].spec.nbytes, dtype=torch.uint8)
                ranks.receive(buffer=buffer, index=sender, sender=sender)
                assert torch.equal(buffer, buckets[sender].data)
            for each in sent:
                each.result(TIMEOUT_S)
            with pytest.raises(WeightSyncError, match="bucket 5 is of sender 2, and this worker met 2"):
                ranks.receive(buffer=buffer, index=5, sender=2)


def test_it_keeps_its_deadline_where_nobody_listens() -> None:
    """torch's own store would go on for up to 2.3 times of it, while the learner has given up."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
    spec = JoinGroup(
        epoch=9, backend="gloo", host=LOOPBACK, port=port, rank_offset=1, world_size=2,
        meet_timeout_s=3.0, bucket_timeout_s=3.0,
    )  # fmt: skip
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"could not join group 9 of 2 .*nothing accepted a connection"):
        BroadcastRank(spec=spec, worker_rank=0, device=torch.device("cpu"))
    assert time.monotonic() - started < 5.0


class CompletedCollective:
    """A collective of NCCL as torch hands it out: one that has failed is completed, too."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self._failure

    def synchronize(self) -> None:
        """It is through."""


class FailingGroup:
    """In place of the process group, whose broadcasts fail."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure
        self.aborted = False

    def broadcast(self, *_: object) -> CompletedCollective:
        return CompletedCollective(self._failure)

    def abort(self) -> None:
        self.aborted = True


def of_nccl(group: FailingGroup) -> BroadcastRank:
    """A rank as it is after its meeting, in this group."""
    rank = object.__new__(BroadcastRank)
    spec = JoinGroup(
        epoch=1, backend="nccl", host=LOOPBACK, port=1, rank_offset=1, world_size=2,
        meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    vars(rank).update(_spec=spec, device=torch.device("cuda"), _group=group, _timeout=None)
    return rank


def test_a_collective_that_is_completed_because_it_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.weights.group.dist.BroadcastOptions", lambda: type("Options", (), {})())
    died = FailingGroup(RuntimeError("NCCL error:\nremote process exited"))
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"bucket 3 did not arrive .*NCCL error: remote process exited"):
        of_nccl(died).receive(buffer=torch.empty(4, dtype=torch.uint8), index=3)
    assert time.monotonic() - began < TIMEOUT_S
    assert died.aborted
    well = FailingGroup(None)
    of_nccl(well).receive(buffer=torch.empty(4, dtype=torch.uint8), index=0)
    assert not well.aborted
