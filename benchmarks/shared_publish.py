"""Bytes, memory and seconds of a publish: by rank 0 alone, by all ranks of a learner, each its share, and in slices.

    .venv/bin/python -m benchmarks.shared_publish [--ranks 2] [--workers 2] [--layers N] [--rounds N]

Real ranks under DeepSpeed's ZeRO-3 copy, hash and broadcast a random Llama in bfloat16 over gloo to workers, which are
processes with the generator's own receiving side (`generator/weights/group.py`) and its checks of hashes, without an
engine. Slices are what vLLM's loaders read of a Llama: rows of most matrices, columns of two in each layer. What a
process has sent and received is the kernel's count of its TCP connections (TCP_INFO), in two parts of a publish: while
the copy is made, and while it is hashed and broadcast. A peak of memory counts from before the copy. The ways take
turns, round by round, in the same processes. Results go to benchmarks/results/shared_publish.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import described_machine, peak_rss, rss
from benchmarks.rank_processes import some_ranks
from generator.weights.group import BroadcastRanks
from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer
from learner.weights.probe import Probe
from learner.weights.process_group import Meeting, in_thread, joined
from learner.weights.published import PackedWeights, Packer, Snapshot
from learner.weights.senders import MeetingTerms, SendingGroups, sliced_weights, together
from learner.weights.slices import SlicedWeights, Slicer
from protocol.fleet import JoinGroup, Prepare, SliceLayout, TensorBox, WorkerSlices
from services.http.client import HttpClient
from services.network import LOOPBACK
from services.process import DaemonThreads

RESULTS = Path(__file__).with_name("results")
WAYS = ("rank 0", "all ranks", "slices")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
TIMEOUT_S = 120.0
BUCKET_BYTES = 8 << 20
_TCP_INFO_BYTES = (200, 128)
"""Offsets of the bytes sent and received in the kernel's struct tcp_info (linux/tcp.h)."""
_MB = 1e6


def network_bytes() -> tuple[int, int]:
    """Bytes that this process has sent and received over its open TCP connections."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            counts = [struct.unpack_from("Q", info, offset)[0] for offset in _TCP_INFO_BYTES]
            sent, received = sent + counts[0], received + counts[1]
    return sent, received


class ProcessCounts:
    """Answers who asks for this process's bytes and memory, from a thread, at an address in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK, 0))
        self._held = rss()
        threading.Thread(target=self._answer, daemon=True).start()
        (folder / name).write_text(str(self._socket.getsockname()[1]), encoding="ascii")

    def _answer(self) -> None:
        while True:
            asked, whom = self._socket.recvfrom(100)
            if asked == b"anew":
                self._held = rss()
            sent, received = network_bytes()
            self._socket.sendto(json.dumps([sent, received, peak_rss() - self._held]).encode(), whom)


def counts_of(folder: Path, name: str, *, anew: bool = False) -> Sequence[int]:
    """Bytes sent and received, and of memory at the peak above where it stood when it was last counted `anew`."""
    file = folder / name
    while not file.exists() or not file.read_text(encoding="ascii"):
        time.sleep(0.05)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.sendto(b"anew" if anew else b"", (LOOPBACK, int(file.read_text(encoding="ascii"))))
        found: list[int] = json.loads(asking.recv(1000))
    return found


def worker(folder: Path, number: int) -> None:
    """Joins and receives as it is told on its standard input, and checks each hash."""
    torch.set_num_threads(1)
    ProcessCounts(folder, f"worker {number}")
    groups: dict[int, BroadcastRanks] = {}
    for line in sys.stdin:
        if line.startswith("join "):
            spec = JoinGroup.model_validate_json(line[5:])
            groups[spec.epoch] = BroadcastRanks(spec=spec, worker_rank=number, device=torch.device("cpu"))
        else:
            plan = Prepare.model_validate_json(line)
            _receive(groups[plan.epoch], plan, number)
        print("done", flush=True)


def layout_of(packed: PackedWeights, *, workers: int) -> SliceLayout:
    """The slices of a Llama's weights that each worker reads: rows of most matrices, columns of two in each layer."""

    def boxes(worker: int) -> dict[str, tuple[TensorBox, ...]]:
        found: dict[str, tuple[TensorBox, ...]] = {}
        for spec in (spec for bucket in packed.buckets for spec in bucket.spec.tensors):
            cut = 0 if any(part in spec.name for part in _BY_ROWS) else 1
            if cut == 0 or any(part in spec.name for part in _BY_COLUMNS):
                shape = [size // workers if at == cut else size for at, size in enumerate(spec.shape)]
                start = [worker * shape[at] if at == cut else 0 for at in range(len(shape))]
                found[spec.name] = (TensorBox(start=tuple(start), shape=tuple(shape)),)
        return found

    return SliceLayout(workers=tuple(WorkerSlices(boxes=boxes(worker)) for worker in range(workers)))


def _receive(ranks: BroadcastRanks, plan: Prepare, worker: int) -> None:
    arriving = plan.arriving(worker)

    def of(sender: int) -> None:
        for index, bucket in enumerate(arriving):
            if bucket.sender == sender:
                buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
                ranks.receive(buffer=buffer, index=index, sender=sender)
                assert xxhash.xxh3_64_hexdigest(buffer.numpy().data) == bucket.xxh3, f"bucket {index} is damaged"

    threads = [threading.Thread(target=of, args=(sender,)) for sender in {b.sender for b in arriving}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class WorkerProcesses:
    """The workers, as rank 0 speaks to them."""

    def __init__(self, folder: Path, count: int) -> None:
        argv = [sys.executable, "-m", "benchmarks.shared_publish", "--folder", str(folder), "--worker"]
        self.names = [f"worker {number}" for number in range(count)]
        self._children = [
            subprocess.Popen([*argv, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in range(count)
        ]

    def tell(self, line: str) -> None:
        """Tells all; `done` returns when they have done it."""
        for child in self._children:
            assert child.stdin is not None, "it is a pipe"
            child.stdin.write(line + "\n")
            child.stdin.flush()

    def done(self) -> None:
        """Waits for all."""
        for child in self._children:
            assert child.stdout is not None, "it is a pipe"
            if child.stdout.readline() != "done\n":
                raise RuntimeError("a worker ended")

    def end(self) -> None:
        """Ends them."""
        for child in self._children:
            child.kill()
            child.wait()


class Publishing:
    """Rank 0's publishes in both ways; `seen` has the numbers of each way by what they are of."""

    def __init__(self, trainer: Trainer, workers: WorkerProcesses, folder: Path, *, ranks: int) -> None:
        self._trainer = trainer
        self._workers = workers
        self._folder = folder
        self._names = [f"rank {rank}" for rank in range(ranks)] + workers.names
        self._threads = DaemonThreads(name="publish")
        self._epoch = 0
        self._slicer = Slicer()
        self.seen: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
        self.nbytes = 0

    def median(self, way: str, key: str) -> float:
        """Of all rounds that count."""
        return statistics.median(self.seen[way][key])

    async def round(self, way: str, client: HttpClient, *, counts: bool) -> None:
        """A publish."""
        start = [counts_of(self._folder, name, anew=True) for name in self._names]
        times = [time.monotonic()]
        copy = self._trainer.host_copy(bucket_bytes=BUCKET_BYTES, shared=way != "rank 0")
        times.append(time.monotonic())
        copied = [counts_of(self._folder, name) for name in self._names]
        snapshot = Snapshot(version=1, buckets=copy.buckets, probe=Probe(), shares=copy.shares)
        packer = Packer(incarnation=1, threads=self._threads, client=client)
        packing = time.monotonic()
        packed = await packer.pack(snapshot)
        slices = await self._sliced(packed) if way == "slices" else None
        times.append(time.monotonic() - packing)
        groups = await self._meet(packed, sliced=0 if slices is None else len(slices.buckets))
        met = [counts_of(self._folder, name) for name in self._names]
        sending = time.monotonic()
        await self._send(groups, packed, slices)
        slices = None
        times.append(time.monotonic() - sending)
        ended = [counts_of(self._folder, name) for name in self._names]
        groups.close()
        self.nbytes = packed.nbytes("whole")
        if not counts:
            return
        seen = self.seen[way]
        for name, value in zip(("copy", "hash", "send"), (times[1] - times[0], times[2], times[3]), strict=True):
            seen[name].append(value)
        for name, *counted, last in zip(self._names, start, copied, met, ended, strict=True):
            for what, value in zip(("sent", "received"), range(2), strict=True):
                first, middle, before = (counts[value] for counts in counted)
                seen[f"{name} copy {what}"].append((middle - first) / _MB)
                seen[f"{name} send {what}"].append((last[value] - before) / _MB)
            seen[f"{name} peak"].append(last[2] / _MB)

    async def _sliced(self, packed: PackedWeights) -> SlicedWeights:
        layout = layout_of(packed, workers=len(self._workers.names))
        return await sliced_weights(packed, layout, slicer=self._slicer, threads=self._threads)

    async def _meet(self, packed: PackedWeights, *, sliced: int) -> SendingGroups:
        self._epoch += 1
        world = 2 if sliced else 1 + len(self._workers.names)
        meeting = Meeting(host=LOOPBACK, epoch=self._epoch, world_size=world, timeout_s=TIMEOUT_S)
        spec = JoinGroup(
            epoch=self._epoch, backend="gloo", host=LOOPBACK, port=meeting.port, rank_offset=1, world_size=world,
            meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S, senders=1 + len(packed.links), sliced=sliced,
        )  # fmt: skip
        self._workers.tell("join " + spec.model_dump_json())
        asked = MeetingTerms(LOOPBACK, meeting.port, self._epoch, world, "gloo", TIMEOUT_S, sliced)
        own = joined(meeting, backend="gloo", sliced=sliced, threads=self._threads)
        made, *_ = await together([own, *(link.meet(asked) for link in packed.links)])
        await in_thread(self._workers.done, threads=self._threads)
        return SendingGroups(own=made, epoch=self._epoch)

    async def _send(self, groups: SendingGroups, packed: PackedWeights, slices: SlicedWeights | None) -> None:
        specs = tuple(bucket.spec for bucket in packed.buckets)
        plan = Prepare(
            version=str(packed.version), epoch=groups.epoch, buckets=specs, slices=slices.specs if slices else ()
        )
        self._workers.tell(plan.model_dump_json())
        if slices is None:
            await groups.send(packed.buckets, timeout_s=TIMEOUT_S, threads=self._threads)
        else:
            await groups.send_slices(slices.buckets, timeout_s=TIMEOUT_S, threads=self._threads)
        await in_thread(self._workers.done, threads=self._threads)


async def _published(publishing: Publishing, rounds: int) -> None:
    async with HttpClient() as client:
        for number in range(rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                await publishing.round(way, client, counts=number > 0)


def measured(folder: Path, given: argparse.Namespace) -> None:
    """The life of a rank; rank 0 writes the report."""
    with some_ranks(given.ranks) as (ranks, commands):
        config = TrainingConfig(zero_stage=3, dtype="bfloat16", publish_dtype="bfloat16")
        trainer = Trainer(folder / "model", algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
        ProcessCounts(folder, f"rank {ranks.rank}")
        if not ranks.leads:
            trainer.follow()
            return
        workers = WorkerProcesses(folder, given.workers)
        try:
            publishing = Publishing(trainer, workers, folder, ranks=ranks.count)
            asyncio.run(_published(publishing, given.rounds))
        finally:
            workers.end()
        (folder / "report").write_text(report(publishing, given), encoding="utf-8")
        trainer.close()


def report(publishing: Publishing, given: argparse.Namespace) -> str:
    """The table."""
    names = [f"rank {rank}" for rank in range(given.ranks)] + [f"worker {number}" for number in range(given.workers)]
    lines = [
        f"# A publish by rank 0 alone, by all ranks, and in slices\n\n`python -m benchmarks.shared_publish`: "
        f"{publishing.nbytes / _MB:.1f} MB of bfloat16, {given.ranks} ranks under ZeRO-3, {given.workers} workers of "
        "a generator over gloo, all on one machine. MB that the kernel counted on each process's TCP connections, sent "
        f"and received; medians of {given.rounds} rounds, in turns.\n",
        "| way | process | copying: sent | received | sending: sent | received | peak memory above before, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        for name in names:
            counts = [f"{name} {part} {what}" for part in ("copy", "send") for what in ("sent", "received")]
            cells = [f"{publishing.median(way, key):.1f}" for key in (*counts, f"{name} peak")]
            lines.append(f"| {way} | {name} | {' | '.join(cells)} |")
    lines += ["", "| way | copy, s | hash, and cut slices, s | broadcast with checks, s |", "|---|---|---|---|"]
    for way in WAYS:
        cells = [f"{publishing.median(way, part):.2f}" for part in ("copy", "hash", "send")]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{described_machine()}.", ""])


def main() -> None:
    """Measures, prints and writes the report; with --folder it is one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        worker(given.folder, given.worker)
    elif given.folder is not None:
        measured(given.folder, given)
    else:
        with tempfile.TemporaryDirectory() as folder:
            shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": given.layers}
            config = LlamaConfig(num_attention_heads=8, vocab_size=8192, max_position_embeddings=512, **shape)
            LlamaForCausalLM(config).save_pretrained(Path(folder, "model"))
            Path(folder, "model", "tokenizer.json").write_text("{}", encoding="utf-8")
            argv = [sys.executable, "-m", "benchmarks.shared_publish", *sys.argv[1:], "--folder", folder]
            subprocess.run(argv, check=True)
            text = Path(folder, "report").read_text(encoding="utf-8")
        print(text)
        (RESULTS / "shared_publish.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
