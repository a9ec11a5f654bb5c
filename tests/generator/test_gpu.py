"""Parts of a weight sync that only GPUs can show: NCCL's meeting, a member's death, and staging in host memory.

    .venv/bin/python -m pytest -m gpu tests/generator/test_gpu.py

The learner's end is in this process, on the first GPU; each member is a process of its own.
"""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from learner.weights.process_group import Meeting, ProcessGroupError, pack_buckets
from protocol.fleet import JoinGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

TIMEOUT_S = 20.0
TENSORS = [("weight", torch.arange(1 << 20, dtype=torch.float32))]


def member(pipe: Connection, spec: str, device: int, dies: bool) -> None:
    """Meets the learner, and receives one bucket or dies before it."""
    from generator.weights.transfer import BroadcastRank

    group = BroadcastRank(spec=JoinGroup.model_validate_json(spec), worker_rank=0, device=torch.device("cuda", device))
    pipe.send("met")
    if dies:
        os._exit(1)
    buffer = torch.empty(4 << 20, dtype=torch.uint8, device=group.device)
    group.receive(buffer=buffer, index=0)
    pipe.send(float(buffer.view(torch.float32).sum()))


def met_with(meeting: Meeting, *, device: int, dies: bool) -> "tuple[Connection, multiprocessing.process.BaseProcess]":
    spec = JoinGroup(
        epoch=1, backend="nccl", host="127.0.0.1", port=meeting.port, rank_offset=1, world_size=2,
        meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=member, args=(theirs, spec.model_dump_json(), device, dies))
    process.start()
    return ours, process


@pytest.fixture
def meeting() -> Meeting:
    return Meeting(host="127.0.0.1", epoch=1, world_size=2, timeout_s=TIMEOUT_S)


def test_a_broadcast_over_nccl_arrives(meeting: Meeting) -> None:
    pipe, process = met_with(meeting, device=1, dies=False)
    with meeting.join(backend="nccl") as group:
        assert pipe.recv() == "met"
        group.send(pack_buckets(TENSORS, bucket_bytes=64 << 20), timeout_s=TIMEOUT_S)
        assert pipe.recv() == pytest.approx(float(TENSORS[0][1].sum()))
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_the_death_of_a_member_fails_the_send_in_time_and_ends_no_other_process(meeting: Meeting) -> None:
    pipe, process = met_with(meeting, device=1, dies=True)
    with meeting.join(backend="nccl") as group:
        assert pipe.recv() == "met"
        process.join(TIMEOUT_S)
        with pytest.raises(ProcessGroupError, match="was not taken by all"):
            group.send(pack_buckets(TENSORS, bucket_bytes=64 << 20), timeout_s=3.0)
    assert torch.ones(3, device="cuda").sum().item() == 3, "this process computes on"


def test_one_that_does_not_come_makes_the_meeting_end_by_its_timeout() -> None:
    alone = Meeting(host="127.0.0.1", epoch=1, world_size=2, timeout_s=3.0)
    with pytest.raises(ProcessGroupError, match="not all came"):
        alone.join(backend="nccl")


def test_a_second_rank_on_the_same_gpu_is_an_error_and_no_hang(meeting: Meeting) -> None:
    _, process = met_with(meeting, device=0, dies=False)
    with pytest.raises(ProcessGroupError):
        meeting.join(backend="nccl")
    process.join(TIMEOUT_S)
    process.kill()
