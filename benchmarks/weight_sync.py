"""Cost of weight sync beside raw gloo: the same bytes in the same buckets between two processes, in turns.

    python -m benchmarks.weight_sync [--shape 135m 1.5b] [--dtype bfloat16 float32] [--rounds N] [--bucket-mb N]

This process is the learner: its own host copy, packing, hashes, digest and broadcast, with its allocator's settings.
The other one (`weight_sync_generator.py`) has the generator's own transfer engine, which receives, verifies, loads and
fingerprints. In place of vLLM's engine a transformers model of the same shape takes the weights, so that what vLLM
itself does in a load (layerwise reload, packing of linear layers for a CPU) is not in it. Raw gloo is
`torch.distributed.broadcast` of buckets that are there already into one buffer that is used again and again, with no
check of anything. Each round changes every weight, and fails unless the fingerprint of what was loaded is that of what
was sent. Both have one thread of torch. The broadcasts are measured by the clock, all else by CPU time, which other
work on the machine changes less.
"""

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from benchmarks.machine import described_machine, peak_rss, rss
from learner.command import keep_freed_memory
from learner.training.policy import host_copy
from learner.weights.probe import Probe
from learner.weights.process_group import Meeting, MeetingPlace, Rooms
from learner.weights.published import PackedWeights, Packer, Snapshot
from learner.weights.senders import own_buckets
from protocol.fleet import PULLED_EPOCH, JoinGroup, Prepare
from services.network import LOOPBACK
from services.process import DaemonThreads

_LOOPBACK_INTERFACE = "lo"
HEAD = "# Weight sync against raw gloo\n\n`benchmarks/weight_sync.py`, which says what each side is.\n"

TIMEOUT_S = 120.0
TABLE = (
    "| | ours over raw, MB/s | raw gloo, MB/s | ours, MB/s | host copy, s of CPU | hashes and digest, s of CPU | "
    "broadcast with checks, s | load (serving paused), s of CPU | plain copy of the same bytes, s of CPU | hash of "
    "what was loaded, s of CPU | learner's peak, copies beside the trainer's | generator's, beside the model's |\n"
    + "|---" * 12
    + "|"
)


def config_of(shape: str, layers: int) -> PretrainedConfig:
    """SmolLM2-135M's shape; or Qwen2.5-1.5B's with fewer layers, as far as `layers` says."""
    if shape == "135m":
        return LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True,
        )  # fmt: skip
    return Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


class TrainedModel:
    """The trainer's model, as far as a host copy needs it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """They are whole already."""
        del parameters
        return nullcontext()

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The same as the model's."""
        return parameter.detach()


class GeneratorChild:
    """The generator's process, whose model is on `device`."""

    def __init__(self, folder: str, dtype: str, *, device: str = "cpu") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weight_sync_generator", folder, dtype, device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )  # fmt: skip
        self.nothing = int(self.heard()["nothing"])

    def tell(self, **asked: object) -> None:
        """Asks for something; `heard` has the answer."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            if line.startswith('{"did"'):
                return dict(json.loads(line))
        raise RuntimeError(f"the generator's process ended: {self._process.wait()}")

    def end(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


class ProcessPair:
    """Both processes, and the seconds of what they do, of CPU by default."""

    def __init__(
        self,
        model: nn.Module,
        child: GeneratorChild,
        *,
        dtype: str,
        bucket_bytes: int,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._whole = TrainedModel(model)
        self._clock = clock
        self._child = child
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._rooms = Rooms()
        self._meet()
        self.took: dict[str, list[float]] = defaultdict(list)
        self.packed: PackedWeights | None = None
        self.peak_learner = self.peak_generator = 0

    def _meet(self) -> None:
        place = MeetingPlace(host=LOOPBACK, timeout_s=TIMEOUT_S)
        raw = f"tcp://{LOOPBACK}:{place.port + 1}"
        self._child.tell(do="meet_raw", url=raw)
        dist.init_process_group("gloo", init_method=raw, rank=0, world_size=2)
        self._child.heard()
        meeting = Meeting(host=LOOPBACK, epoch=1, world_size=2, timeout_s=TIMEOUT_S, place=place)
        spec = JoinGroup(
            epoch=1, backend="gloo", host=LOOPBACK, port=place.port, rank_offset=1, world_size=2,
            meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
        )  # fmt: skip
        self._child.tell(do="join", spec=spec.model_dump_json())
        self._group = meeting.join(backend="gloo")
        self._child.heard()

    def round(self, number: int, *, counts: bool) -> None:
        """Sends a version by ours and its bytes by raw gloo; first the one, then the other, in turns."""
        took: dict[str, float] = {}
        if number % 2 and self.packed is not None:
            took["raw_s"] = self._raw(self.packed)
        self._ours(number, took)
        assert self.packed is not None, "it was packed"
        if "raw_s" not in took:
            took["raw_s"] = self._raw(self.packed)
        self._child.tell(do="copy")
        took["copy_s"] = float(self._child.heard()["copy_s"])
        if counts:
            for name, seconds in took.items():
                self.took[name].append(seconds)

    def _raw(self, packed: PackedWeights) -> float:
        buffers = [bucket.data for bucket in own_buckets(packed.buckets)]
        sizes = [buffer.numel() for buffer in buffers]
        self._child.tell(do="room_for_raw", size=max(sizes))
        self._child.heard()
        start = time.perf_counter()
        self._child.tell(do="raw", sizes=sizes)
        for buffer in buffers:
            dist.broadcast(buffer, src=0)
        self._child.heard()
        seconds = time.perf_counter() - start
        self._child.tell(do="drop_raw")
        self._child.heard()
        return seconds

    def _ours(self, number: int, took: dict[str, float]) -> None:
        took.update(self.version(number, rooms=self._rooms, bring=self.by_broadcast))

    def version(self, number: int, *, rooms: Rooms, bring: Callable[[PackedWeights], float]) -> dict[str, float]:
        """Seconds of a version by its parts; `bring` has the generator stage it, and returns its seconds of CPU."""
        with torch.no_grad():
            for parameter in self._whole.model.parameters():
                parameter.add_(0.01 + number)
        rss()
        start = self._clock()
        whole, dtype = cast("tuple[Any, Any]", (self._whole, self._dtype))
        copied = host_copy(whole, dtype=dtype, keep=True, bucket_bytes=self._bucket_bytes, rooms=rooms)
        snapshot = Snapshot(version=number, buckets=copied.buckets, probe=Probe())
        offered = self._clock()
        threads = DaemonThreads(name="pack")
        self.packed = asyncio.run(Packer(incarnation=1, threads=threads).pack(snapshot))
        packed = self._clock()
        sending, cpu = time.perf_counter(), time.process_time()
        theirs = bring(self.packed)
        sent, cpu = time.perf_counter(), theirs + time.process_time() - cpu
        self._child.tell(do="load")
        loaded = self._child.heard()
        if loaded["fingerprint"] != fingerprint_of(self._whole.model):
            raise RuntimeError(f"round {number}: what was loaded is not what was sent")
        self.peak_learner = max(self.peak_learner, peak_rss())
        self.peak_generator = max(self.peak_generator, int(loaded["peak"]))
        return {
            "host_copy_s": offered - start, "pack_s": packed - offered, "broadcast_s": sent - sending, "cpu_s": cpu,
            "load_s": loaded["load_s"], "fingerprint_s": loaded["hash_s"],
        }  # fmt: skip

    def by_broadcast(self, packed: PackedWeights) -> float:
        """Over gloo."""
        self._child.tell(do="stage", plan=plan_of(packed, epoch=1).model_dump_json())
        self._group.send(own_buckets(packed.buckets), timeout_s=TIMEOUT_S)
        return float(self._child.heard()["cpu_s"])

    def by_shared_memory(self, packed: PackedWeights) -> float:
        """From files in this process's memory."""
        files = [bucket.file.path for bucket in own_buckets(packed.buckets) if bucket.file is not None]
        plan = plan_of(packed, epoch=PULLED_EPOCH)
        self._child.tell(do="stage_files", plan=plan.model_dump_json(), paths=files)
        return float(self._child.heard()["cpu_s"])


def plan_of(packed: PackedWeights, *, epoch: int) -> Prepare:
    """The request to stage a version."""
    specs = tuple(bucket.spec for bucket in packed.buckets)
    return Prepare(version=str(packed.version), epoch=epoch, buckets=specs)


def fingerprint_of(model: nn.Module) -> str:
    """As the generator's: over names and values."""
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().view(-1).view(torch.uint8).cpu().numpy().data)
    return str(digest.hexdigest())


def measured(shape: str, dtype: str, given: argparse.Namespace) -> str:
    """A row of the table, from a process that has measured no other: it keeps what it frees, as the learner does."""
    config = config_of(shape, given.layers)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        child = GeneratorChild(folder, dtype)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        ctypes.CDLL(None).malloc_trim(0)  # what the model was made in
        held = rss()
        pair = ProcessPair(model, child, dtype=dtype, bucket_bytes=given.bucket_mb << 20)
        for number in range(given.rounds + 2):
            pair.round(number, counts=number >= 2)
    finally:
        child.end()
        if dist.is_initialized():
            dist.destroy_process_group()
    took = {name: statistics.median(values) for name, values in pair.took.items()}
    ratios = [raw / ours for raw, ours in zip(pair.took["raw_s"], pair.took["broadcast_s"], strict=True)]
    name = shape if shape == "135m" else f"{shape}, {given.layers} of 28 layers"
    return (
        f"| {name}, {dtype}, {nbytes / 1e6:.0f} MB | **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to "
        f"{max(ratios):.2f}) | {nbytes / 1e6 / took['raw_s']:.0f} | {nbytes / 1e6 / took['broadcast_s']:.0f} | "
        f"{took['host_copy_s']:.3f} | {took['pack_s']:.3f} | {took['broadcast_s']:.3f} | {took['load_s']:.3f} | "
        f"{took['copy_s']:.3f} | {took['fingerprint_s']:.3f} | {(pair.peak_learner - held) / nbytes:.1f} | "
        f"{(pair.peak_generator - child.nothing) / nbytes - 1:.1f} |"
    )


def like_a_learner() -> None:
    """The settings of the learner's process, and the interface of the raw group."""
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK_INTERFACE  # in both processes; ours names its own
    keep_freed_memory()
    torch.set_num_threads(1)


def main() -> None:
    """Measures, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=("135m", "1.5b"), default=["135m", "1.5b"])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mb", type=int, default=64, help="as weights.bucket_mb")
    parser.add_argument("--layers", type=int, default=4, help="of the 1.5b shape; all 28 need some 20 GB")
    parser.add_argument("--output", type=Path, help="append the table to this file")
    given = parser.parse_args()
    rows: list[str] = []
    for shape in given.shape:
        for dtype in given.dtype:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=like_a_learner) as process:
                rows.append(process.submit(measured, shape, dtype, given).result())
            print(rows[-1], flush=True)
    told = f"Buckets of {given.bucket_mb} MiB, {given.rounds} rounds, medians. {described_machine()}."
    text = "\n".join([told, "", TABLE, *rows, ""])
    if given.output is None:
        print(text)
    else:
        before = given.output.read_text(encoding="utf-8") if given.output.exists() else HEAD
        given.output.write_text(f"{before}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
