"""Process groups over NCCL on one GPU: alone, two processes as they are, and two that NCCL takes for two hosts' own.

NCCL refuses two processes of one host on one GPU. With another NCCL_HOSTID the second one counts as another host's, and
both are connected by sockets: then our time-outs, aborts, and the death of either side can be seen on one GPU. Its
speed is that of sockets on loopback. In a rehearsal gloo takes its place.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import torch

from benchmarks.gpu.rows import rate, rehearses, say
from generator.weights.group import BroadcastRank
from generator.weights.plan import WeightSyncError
from learner.weights.process_group import BroadcastGroup, Bucket, Meeting, ProcessGroupError, pack_buckets
from protocol.fleet import Backend, JoinGroup
from services.nccl import keep_to_interface_of
from services.network import LOOPBACK

How = Literal["takes", "dies", "stalls"]
BACKEND: Backend = "gloo" if rehearses() else "nccl"
DEVICE = torch.device("cpu") if rehearses() else torch.device("cuda", 0)
MEET_S = 20.0
SEND_S = 4.0
BUCKET_BYTES = 1 << 16 if rehearses() else 64 << 20
BUCKETS = 4 if rehearses() else 16
_ANOTHER_HOST = "another-host"


def buckets() -> list[Bucket]:
    """Buckets that are sent: a GiB."""
    return pack_buckets([(f"w{i}", torch.full((BUCKET_BYTES,), i, dtype=torch.uint8)) for i in range(BUCKETS)],
                        bucket_bytes=BUCKET_BYTES)  # fmt: skip


def member(pipe: Connection, port: int, host: str, how: How) -> None:
    """A generator's worker: it meets the learner, and takes the buckets, dies before them, or never takes any."""
    if host:
        os.environ["NCCL_HOSTID"] = host
    keep_to_interface_of(LOOPBACK)
    spec = JoinGroup(
        epoch=1, backend=BACKEND, host=LOOPBACK, port=port, rank_offset=1, world_size=2, meet_timeout_s=MEET_S,
        bucket_timeout_s=SEND_S,
    )  # fmt: skip
    began = time.monotonic()
    try:
        rank = BroadcastRank(spec=spec, worker_rank=0, device=DEVICE)
        pipe.send("met")
        if how == "dies":
            os._exit(1)
        if how == "stalls":
            time.sleep(60)
        began = time.monotonic()
        buffer = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=rank.device)
        for index in range(BUCKETS):
            rank.receive(buffer=buffer, index=index)
        pipe.send(f"took {BUCKETS} buckets, the last one {'right' if bool((buffer == BUCKETS - 1).all()) else 'wrong'}")
    except WeightSyncError as error:
        pipe.send(f"WeightSyncError after {time.monotonic() - began:.1f} s: {error.reason}")


def lost_leader(port_back: Connection) -> None:
    """A learner that dies as soon as all have met."""
    keep_to_interface_of(LOOPBACK)
    meeting = Meeting(host=LOOPBACK, epoch=1, world_size=2, timeout_s=MEET_S)
    port_back.send(meeting.port)
    with meeting.join(backend=BACKEND):
        time.sleep(1)
        os._exit(1)


def started(work: Callable[..., None], *arguments: object) -> tuple[Connection, BaseProcess]:
    """A process that has its end of a pipe as its first argument."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    return ours, process


def told(pipe: Connection, *, within_s: float = MEET_S + SEND_S + 10) -> str:
    """The next word of the other side."""
    try:
        return str(pipe.recv()) if pipe.poll(within_s) else f"silent for {within_s:g} s"
    except EOFError:
        return "its process ended"


def meet(meeting: Meeting) -> BroadcastGroup | str:
    """The group, or the error by name with the seconds that it took."""
    began = time.monotonic()
    try:
        return meeting.join(backend=BACKEND)
    except ProcessGroupError as error:
        return f"ProcessGroupError after {time.monotonic() - began:.1f} s: {' '.join(str(error).split())}"


def send(group: BroadcastGroup, *, timeout_s: float = SEND_S) -> str:
    """Sends all buckets: the rate, or the error by name."""
    content = buckets()
    began = time.monotonic()
    try:
        group.send(content, timeout_s=timeout_s)
    except ProcessGroupError as error:
        return f"ProcessGroupError after {time.monotonic() - began:.1f} s: {' '.join(str(error).split())}"
    return rate(sum(bucket.spec.nbytes for bucket in content), time.monotonic() - began)


def new_meeting(world_size: int = 2, *, timeout_s: float = MEET_S) -> Meeting:
    """At a port of its own."""
    return Meeting(host=LOOPBACK, epoch=1, world_size=world_size, timeout_s=timeout_s)


def _alone() -> None:
    began = time.monotonic()
    group = meet(new_meeting(1))
    if isinstance(group, str):
        say("a group of one", group, "failed")
        return
    say("a group of one meets", f"{time.monotonic() - began:.1f} s")
    with group:
        say("a group of one sends, host to GPU included", send(group, timeout_s=MEET_S))


def _nobody_comes() -> None:
    found = meet(new_meeting(2, timeout_s=3.0))
    is_error = isinstance(found, str)
    say("nobody comes, limit 3 s", str(found) if is_error else "met nobody", "passed" if is_error else "failed")


def _two_as_they_are() -> None:
    meeting = new_meeting()
    pipe, process = started(member, meeting.port, "", "takes")
    found = meet(meeting)
    refused = isinstance(found, str)
    say("two processes on one GPU, the learner's side", str(found) if refused else "met", "measured")
    say("the same, the member's side", told(pipe))
    process.kill()


def _two_as_two_hosts(how: How) -> None:
    meeting = new_meeting()
    pipe, process = started(member, meeting.port, _ANOTHER_HOST, how)
    began = time.monotonic()
    group = meet(meeting)
    if isinstance(group, str):
        say(f"two as if on two hosts, member {how}", f"{group}; the member: {told(pipe, within_s=5)}", "failed")
        process.kill()
        return
    say(f"two as if on two hosts meet, member {how}", f"{time.monotonic() - began:.1f} s; the member: {told(pipe)}")
    if how == "dies":
        process.join(MEET_S)
    found = send(group, timeout_s=MEET_S if how == "takes" else SEND_S)
    right = ("GB/s" in found) == (how == "takes")
    say(f"learner sends {BUCKETS} buckets, member {how}", found, "passed" if right else "failed")
    if how == "takes":
        say("the member", told(pipe))
    began = time.monotonic()
    group.close()
    say(
        f"learner lets go of the group, member {how}",
        f"{time.monotonic() - began:.1f} s; it computes on: {_computes()}",
    )
    process.kill()


def _leader_dies() -> None:
    leader, process = started(lost_leader)
    pipe, other = started(member, int(told(leader)), _ANOTHER_HOST, "takes")
    met = told(pipe)
    say("the learner dies before it sends, the member", f"{met}; {told(pipe) if met == 'met' else ''}")
    process.kill()
    other.kill()


def _computes() -> float:
    return float(torch.ones(3, device=DEVICE).sum())


def main() -> None:
    """Says all of it; each of them goes on from the one before."""
    keep_to_interface_of(LOOPBACK)
    _alone()
    _nobody_comes()
    _two_as_they_are()
    for how in ("takes", "dies", "stalls", "takes"):
        _two_as_two_hosts(how)
    _leader_dies()
    sys.stdout.flush()
    os._exit(0)  # threads of an aborted group may wait for their own time-out


if __name__ == "__main__":
    main()
