"""Parts of a weight sync that only a GPU can show: NCCL's meeting, a member's death, one GPU for two processes.

    .venv/bin/python -m pytest -m gpu tests/generator/test_gpu.py

The learner's end is in this process, on the first GPU; each member is a process of its own, on the second one if there
is one. NCCL refuses two processes of one host on one GPU: on a machine with one GPU the member calls itself another
host, so that NCCL connects both by sockets.
"""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from learner.weights.process_group import Meeting, ProcessGroupError, pack_buckets
from protocol.fleet import JoinGroup
from services.nccl import keep_to_interface_of
from services.network import LOOPBACK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TIMEOUT_S = 20.0
ENOUGH_BUCKETS = 50
TENSORS = [("weight", torch.arange(1 << 20, dtype=torch.float32))]


def member(pipe: Connection, spec: str, device: int, host: str, dies: bool) -> None:
    """Meets the learner, and receives one bucket or dies before it."""
    from generator.weights.group import BroadcastRank

    if host:
        os.environ["NCCL_HOSTID"] = host
    keep_to_interface_of(LOOPBACK)
    group = BroadcastRank(spec=JoinGroup.model_validate_json(spec), worker_rank=0, device=torch.device("cuda", device))
    pipe.send("met")
    if dies:
        os._exit(1)
    buffer = torch.empty(4 << 20, dtype=torch.uint8, device=group.device)
    group.receive(buffer=buffer, index=0)
    pipe.send(float(buffer.view(torch.float32).sum()))


def met_with(
    meeting: Meeting, *, device: int, host: str = "", dies: bool = False
) -> "tuple[Connection, multiprocessing.process.BaseProcess]":
    spec = JoinGroup(
        epoch=1, backend="nccl", host=LOOPBACK, port=meeting.port, rank_offset=1, world_size=2,
        meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=member, args=(theirs, spec.model_dump_json(), device, host, dies))
    process.start()
    return ours, process


def met_apart(meeting: Meeting, *, dies: bool = False) -> "tuple[Connection, multiprocessing.process.BaseProcess]":
    """A member that NCCL lets meet the learner, whether or not it has a GPU of its own."""
    alone = torch.cuda.device_count() > 1
    return met_with(meeting, device=1 if alone else 0, host="" if alone else "another-host", dies=dies)


@pytest.fixture
def meeting() -> Meeting:
    keep_to_interface_of(LOOPBACK)
    return Meeting(host=LOOPBACK, epoch=1, world_size=2, timeout_s=TIMEOUT_S)


def test_a_broadcast_over_nccl_arrives(meeting: Meeting) -> None:
    pipe, process = met_apart(meeting)
    with meeting.join(backend="nccl") as group:
        assert pipe.recv() == "met"
        group.send(pack_buckets(TENSORS, bucket_bytes=64 << 20), timeout_s=TIMEOUT_S)
        assert pipe.recv() == pytest.approx(float(TENSORS[0][1].sum()))
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_the_death_of_a_member_fails_the_send_in_time_and_ends_no_other_process(meeting: Meeting) -> None:
    pipe, process = met_apart(meeting, dies=True)
    with meeting.join(backend="nccl") as group:
        assert pipe.recv() == "met"
        process.join(TIMEOUT_S)
        # NCCL calls a small bucket sent once it is in buffers of its own.
        buckets = ENOUGH_BUCKETS * pack_buckets(TENSORS, bucket_bytes=64 << 20)
        with pytest.raises(ProcessGroupError, match="was not taken by all"):
            group.send(buckets, timeout_s=3.0)
    assert torch.ones(3, device="cuda").sum().item() == 3, "this process computes on"


def test_one_that_does_not_come_makes_the_meeting_end_by_its_timeout() -> None:
    alone = Meeting(host=LOOPBACK, epoch=1, world_size=2, timeout_s=TIMEOUT_S)  # torch reads it once in a process
    with pytest.raises(ProcessGroupError, match="did not all meet: NCCL timeout"):
        alone.join(backend="nccl")


def test_a_second_rank_on_the_same_gpu_is_an_error_and_no_hang(meeting: Meeting) -> None:
    _, process = met_with(meeting, device=0)
    with pytest.raises(ProcessGroupError):
        meeting.join(backend="nccl")
    process.join(TIMEOUT_S)
    process.kill()
