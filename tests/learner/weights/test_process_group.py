"""Buckets and broadcasts: what is packed arrives, and a failure ends in time."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from learner.weights.process_group import (
    BroadcastGroup,
    BucketWriter,
    LaidOut,
    Meeting,
    ProcessGroupError,
    Rooms,
    pack_buckets,
)
from protocol.fleet import BUCKET_ALIGNMENT
from tests.learner.generators import gloo_group, receive_bucket


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.arange(5, dtype=torch.bfloat16)),
    ("scalar", torch.tensor(2.5)),
    ("turned", torch.arange(6, dtype=torch.float32).reshape(2, 3).t()),
    ("large", torch.arange(100, dtype=torch.int64)),
]


def test_tensors_lie_in_order_at_aligned_offsets_in_buckets_of_about_the_size() -> None:
    buckets = pack_buckets(TENSORS, bucket_bytes=64)
    assert [[tensor.name for tensor in bucket.spec.tensors] for bucket in buckets] == [
        ["a", "b", "scalar"],
        ["turned"],
        ["large"],
    ]
    assert [bucket.spec.nbytes for bucket in buckets] == [64, 32, 800]
    assert all(tensor.offset % BUCKET_ALIGNMENT == 0 for bucket in buckets for tensor in bucket.spec.tensors)


def test_a_bucket_holds_the_bytes_of_its_tensors_and_their_hash() -> None:
    sources = dict(TENSORS)
    for bucket in pack_buckets(TENSORS, bucket_bytes=1 << 20):
        assert bucket.spec.xxh3 == xxhash.xxh3_64_hexdigest(bucket.data.numpy().tobytes())
        for spec in bucket.spec.tensors:
            source = sources[spec.name]
            assert (spec.shape, f"torch.{spec.dtype}") == (tuple(source.shape), str(source.dtype))
            part = bucket.data[spec.offset : spec.offset + source.nbytes]
            assert torch.equal(part.view(source.dtype).view(source.shape), source)


def test_what_is_laid_out_is_converted_and_stays_what_it_was_when_its_source_changes() -> None:
    source = torch.full((3, 5), 1.001)
    writer = BucketWriter(bucket_bytes=40)
    copies = [writer.add(name, source, dtype=torch.bfloat16) for name in ("a", "b")]
    expected = source.to(torch.bfloat16)
    source.zero_()
    buckets = writer.buckets()
    assert [bucket.data.numel() for bucket in buckets] == [32, 32], "two would be larger than 40 bytes"
    for copy, bucket, name in zip(copies, buckets, ("a", "b"), strict=True):
        assert copy.is_contiguous()
        assert torch.equal(copy, expected)
        ((named, lies),) = bucket.named()
        assert (named, lies.data_ptr()) == (name, copy.data_ptr())


def test_what_lies_between_tensors_is_zero_whatever_the_memory_held_before() -> None:
    for _ in range(20):
        freed = [torch.full((BUCKET_ALIGNMENT,), 255, dtype=torch.uint8) for _ in range(20)]
        del freed
        (bucket,) = pack_buckets([("odd", torch.ones(1, dtype=torch.uint8))], bucket_bytes=64)
        assert bucket.data.tolist() == [1] + [0] * (BUCKET_ALIGNMENT - 1)


def written(rooms: Rooms, value: float) -> tuple[LaidOut, ...]:
    """A version of three buckets whose tensors hold this value."""
    writer = BucketWriter(bucket_bytes=64, rooms=rooms)
    for name in ("a", "b", "c"):
        writer.add(name, torch.full((16,), value), dtype=torch.float32)
    return writer.buckets()


@pytest.mark.parametrize("shared", [False, True])
def test_versions_that_follow_each_other_lie_in_the_same_memory_in_turns(shared: bool) -> None:
    rooms, places = Rooms(shared=shared), set()
    newest = written(rooms, 0)
    for version in range(1, 20):
        newest = written(rooms, version)
        places |= {bucket.data.data_ptr() for bucket in newest}
        assert all(bucket.data.view(torch.float32).eq(version).all() for bucket in newest)
    assert len(places) == 6, "those of two versions"


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_not_used_again_while_a_part_of_it_is_in_use_and_what_is_beyond_one_version_is_freed(
    shared: bool,
) -> None:
    rooms = Rooms(shared=shared)
    parts = [tensor for version in range(5) for bucket in written(rooms, version) for _, tensor in bucket.named()]
    for index, part in enumerate(parts):
        assert part.eq(index // 3).all(), "nothing has been written over it"
    assert len(rooms) == 0
    parts.clear()
    del part
    assert len(rooms) == 3


def test_memory_that_a_generator_may_still_read_is_not_used_again() -> None:
    rooms = Rooms(shared=True)

    def given(value: float, *, loaded: bool) -> None:
        buckets = written(rooms, value)
        for file in [bucket.file for bucket in buckets]:
            assert file is not None
            file.lend()
            if loaded:
                file.take_back()

    given(0, loaded=True)
    assert len(rooms) == 3
    given(1, loaded=False)
    assert len(rooms) == 0


@contextmanager
def met(*, members: int = 1, meet_timeout_s: float = 5.0) -> Iterator[tuple[BroadcastGroup, list[Any]]]:
    """A group of the learner and `members` others, whose ends are in the list."""
    meeting = Meeting(host="127.0.0.1", epoch=3, world_size=1 + members, timeout_s=meet_timeout_s)
    with ThreadPoolExecutor() as threads:
        joining = [
            threads.submit(
                gloo_group,
                host=meeting.host,
                port=meeting.port,
                epoch=3,
                rank=rank,
                world_size=1 + members,
                timeout_s=5.0,
            )
            for rank in range(1, 1 + members)
        ]
        with meeting.join(backend="gloo") as group:
            yield group, [future.result() for future in joining]


def test_a_broadcast_reaches_all_members_bit_for_bit() -> None:
    buckets = pack_buckets(TENSORS, bucket_bytes=64)
    with met(members=2) as (group, members), ThreadPoolExecutor() as threads:

        def receive(member: object) -> dict[str, torch.Tensor]:
            parts = [receive_bucket(member, bucket.spec, timeout_s=3.0) for bucket in buckets]
            return {name: tensor for part in parts for name, tensor in part.items()}

        received: list[Future[dict[str, torch.Tensor]]] = [threads.submit(receive, member) for member in members]
        group.send(buckets, timeout_s=3.0)
        for future in received:
            for name, tensor in TENSORS:
                assert torch.equal(future.result()[name], tensor)


def test_a_meeting_that_not_all_attend_ends_by_its_timeout() -> None:
    meeting = Meeting(host="127.0.0.1", epoch=9, world_size=2, timeout_s=0.3)
    with pytest.raises(
        ProcessGroupError, match="connection 9: of the learner and its generators, 2 processes, not all came to "
    ):
        meeting.join(backend="gloo")


def test_a_member_that_takes_nothing_makes_the_send_fail_in_time_and_the_group_closes_at_once() -> None:
    large = pack_buckets([("w", torch.zeros(32 << 20, dtype=torch.uint8))], bucket_bytes=1)
    begun = time.monotonic()
    with (
        met(meet_timeout_s=30.0) as (group, _),
        pytest.raises(ProcessGroupError, match="bucket 1 of 1 was not taken by all"),
    ):
        group.send(large, timeout_s=0.5)
    assert time.monotonic() - begun < 10.0, "neither waited for the meeting's timeout"


def test_a_member_that_died_makes_the_send_fail() -> None:
    large = pack_buckets([("w", torch.zeros(8 << 20, dtype=torch.uint8))], bucket_bytes=1)
    with met() as (group, members):
        members.clear()
        with pytest.raises(ProcessGroupError):
            group.send(large, timeout_s=1.0)


def test_a_closed_group_sends_nothing() -> None:
    with met() as (group, _):
        group.close()
        with pytest.raises(ProcessGroupError, match="was closed"):
            group.send(pack_buckets(TENSORS, bucket_bytes=64), timeout_s=1.0)


def test_the_store_listens_on_the_given_address_only() -> None:
    meeting = Meeting(host="127.0.0.2", epoch=1, world_size=2, timeout_s=0.5)
    tables = [Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{meeting.port:04X}")] == [f"0200007F:{meeting.port:04X}"]


class FailedCollective:
    """A collective of NCCL whose member died: torch calls it completed."""

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception:
        return RuntimeError("NCCL error: remote process exited")


class FailedGroup:
    def __init__(self) -> None:
        self.aborted = False

    def broadcast(self, *_: object) -> FailedCollective:
        return FailedCollective()

    def abort(self) -> None:
        self.aborted = True


def test_a_broadcast_over_nccl_that_is_completed_because_it_failed_is_an_error() -> None:
    died: Any = FailedGroup()
    store: Any = None
    group = BroadcastGroup(group=died, device="meta", store=store)  # any that is not the CPU
    with pytest.raises(ProcessGroupError, match=r"bucket 1 of 1 was not taken by all: NCCL error: remote process"):
        group.send(pack_buckets(TENSORS, bucket_bytes=1 << 20), timeout_s=1.0)
    assert died.aborted
