"""Bytes and pause of publishes of a LoRA policy, by the three ways in which its versions can reach an engine, in turns.

    python -m benchmarks.adapter_publish [--shape addition 135m] [--rounds N] [--rank N]

Three engines of vLLM on one machine hold the same policy: one is sent whole weights with the adapter merged, one adds
the adapter to its base weights itself, and one computes it in vLLM's LoRA layers. In each round the adapter changes,
and each engine in turn gets the new version over gloo while completions run that its pause interrupts; then each
samples for a while. `addition` is the model of the example, in float32; `135m` has SmolLM2-135M's shape and random
weights, in bfloat16. This process is the learner, with its own host copy, hashes and broadcast.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cpu_time import of_process
from benchmarks.machine import described_machine
from generator.engine.options import EngineOptions, prepare_environment
from learner.training.adapters import add_adapters
from learner.training.config import Dtype, LoraConfig
from learner.training.policy import WeightPart, WeightSnapshot, host_copy, load_causal_lm
from learner.weights.probe import Probe
from learner.weights.process_group import BroadcastGroup, Meeting, Rooms, in_thread
from learner.weights.published import BaseWeights, Packer, Snapshot
from learner.weights.senders import own_buckets
from protocol.fleet import JoinGroup, Prepare
from protocol.generation import Sampling
from services.network import LOOPBACK
from services.process import DaemonThreads

TIMEOUT_S = 120.0
WAYS = ("merged by the learner", "added by the generator", "in LoRA layers")
TABLE = (
    "| model | adapter | bytes a publish | of the first | host copy and hashes, ms | send and stage, ms | pause, ms | "
    "tokens/s | tokens per s of the engine's CPU |\n" + "|---" * 9 + "|"
)
SHAPE_135M = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class AdaptedTrainee:
    """The trainer's model, as far as a host copy needs it."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, rank: int) -> None:
        self.model = load_causal_lm(folder, dtype=dtype)
        self.lora = LoraConfig(rank=rank, alpha=2.0 * rank)
        add_adapters(self.model, self.lora)
        self._factors = [each for name, each in self.model.named_parameters() if "lora_" in name]

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """They are whole already."""
        del parameters
        return nullcontext()

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The same as the model's."""
        return parameter.detach()

    def change(self) -> None:
        """As a step does."""
        with torch.no_grad():
            for factor in self._factors:
                factor.add_(torch.randn_like(factor), alpha=1e-3)


@dataclass
class AdapterWay:
    """An engine that is sent versions in one of the ways, and what that took."""

    name: str
    options: EngineOptions
    trained: AdaptedTrainee
    is_alone: bool
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: list[int] = field(default_factory=list)

    async def start(self, epoch: int) -> None:
        """Starts the engine, and meets it."""
        from generator.engine.engine import Engine

        self._threads = DaemonThreads(name=self.name)
        self._packer = Packer(incarnation=1, threads=self._threads)
        self._rooms, self._base, self._held = Rooms(), self._copied_base() if self.is_alone else None, ""
        before = set(multiprocessing.active_children())
        self.engine = await Engine.start(options=self.options)
        self._processes = set(multiprocessing.active_children()) - before
        meeting = Meeting(host=LOOPBACK, epoch=epoch, world_size=2, timeout_s=TIMEOUT_S)
        spec = JoinGroup(
            epoch=epoch, backend="gloo", host=LOOPBACK, port=meeting.port, rank_offset=1, world_size=2,
            meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
        )  # fmt: skip
        joined, _ = await asyncio.gather(
            in_thread(lambda: meeting.join(backend="gloo"), threads=self._threads), self.engine.join_group(spec)
        )
        self._group: BroadcastGroup = joined

    def _copied_base(self) -> BaseWeights:
        lora = self.trained.lora
        return BaseWeights(buckets=self._copy("base").buckets, rank=lora.rank, alpha=lora.alpha)

    def _copy(self, part: WeightPart) -> WeightSnapshot:
        rooms = None if part == "base" else self._rooms
        dtype: Dtype = "float32" if self.options.dtype == "float32" else "bfloat16"
        return host_copy(self.trained, dtype=dtype, keep=True, bucket_bytes=64 << 20, rooms=rooms, part=part)

    async def publish(self, version: int) -> None:
        """Sends the trainer's weights as they are now."""
        start = time.perf_counter()
        copy = self._copy("adapter" if self.is_alone else "merged")
        packed = await self._packer.pack(Snapshot(version, copy.buckets, Probe(), base=self._base))
        packed_at = time.perf_counter()
        buckets = own_buckets(packed.in_form(packed.form_for([self._held])))
        plan = Prepare(
            version=str(packed.version), epoch=1, buckets=tuple(each.spec for each in buckets), adapter=packed.adapter
        )
        sending = in_thread(lambda: self._group.send(buckets, timeout_s=TIMEOUT_S), threads=self._threads)
        await asyncio.gather(sending, self.engine.stage(plan))
        staged_at = time.perf_counter()
        report = await self.engine.commit(version=str(packed.version))
        self._held = "" if packed.adapter is None else packed.adapter.base
        self.sent.append(sum(each.spec.nbytes for each in buckets))
        if version:  # of the first one all is sent, and fresh memory is touched
            self.took["copy"].append(packed_at - start)
            self.took["send"].append(staged_at - packed_at)
            self.took["pause"].append(report.pause_s)

    def _cpu_s(self) -> float:
        return sum(of_process(each.pid or 0) for each in self._processes)

    async def sample(self, *, rows: int, tokens: int) -> tuple[float, float]:
        """Samples a batch of so many completions: its tokens a second, and a second of the engine's CPU time."""
        start, cpu_s = time.perf_counter(), self._cpu_s()
        sampling = Sampling(max_tokens=tokens)
        async for _ in self.engine.generate(
            request_id=f"{start}", prompt_token_ids=[3, 4, 5, 6], n=rows, sampling=sampling
        ):
            continue
        return rows * tokens / (time.perf_counter() - start), rows * tokens / (self._cpu_s() - cpu_s)

    def line(self, shape: str) -> str:
        """Its line of the table."""
        took = {name: [1000 * value for value in values] for name, values in self.took.items()}
        rate, of_cpu = self.took["rate"], self.took["of_cpu"]
        return (
            f"| {shape} | {self.name} | {self.sent[-1]:,} | {self.sent[0]:,} | {_shown(took['copy'])} | "
            f"{_shown(took['send'])} | {_shown(took['pause'])} | {statistics.median(rate):.0f} ({max(rate):.0f}) | "
            f"{statistics.median(of_cpu):.0f} ({max(of_cpu):.0f}) |"
        )


def _shown(values: Sequence[float]) -> str:
    return f"**{statistics.median(values):.1f}** ({min(values):.1f})"


def _options(folder: Path, shape: str, *, lora_rank: int) -> EngineOptions:
    small = shape == "addition"
    return EngineOptions(
        model=str(folder), dtype="float32" if small else "bfloat16", max_model_len=128 if small else 512,
        kv_cache_gb=0.25, tokenizer=False, policy_rank=lora_rank, load_format="auto" if small else "dummy",
    )  # fmt: skip


async def _measured(shape: str, folder: Path, *, rounds: int, rank: int) -> list[str]:
    dtype = torch.float32 if shape == "addition" else torch.bfloat16
    trained = AdaptedTrainee(folder, dtype=dtype, rank=rank)
    ways = [
        AdapterWay(name, _options(folder, shape, lora_rank=rank if number == 2 else 0), trained, is_alone=number > 0)
        for number, name in enumerate(WAYS)
    ]
    for number, way in enumerate(ways):
        await way.start(number + 1)
    rows, tokens = (64, 100) if shape == "addition" else (16, 24)
    for version in range(rounds + 1):
        trained.change()
        for way in ways:
            running = asyncio.create_task(way.sample(rows=rows, tokens=tokens))
            await asyncio.sleep(0.1)
            await way.publish(version)
            await running
        for way in ways:
            rate, of_cpu = await way.sample(rows=rows, tokens=tokens)
            if version:
                way.took["rate"].append(rate)
                way.took["of_cpu"].append(of_cpu)
    for way in ways:
        await way.engine.shutdown()
    return [way.line(shape) for way in ways]


def _made_135m(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE_135M).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=("addition", "135m"), default=["addition", "135m"])
    parser.add_argument("--addition", type=Path, default=Path("models/addition"), help="folder of the example's model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    asked = parser.parse_args()
    prepare_environment(_options(asked.addition, "addition", lora_rank=asked.rank))
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in asked.shape:
            model = asked.addition if shape == "addition" else _made_135m(Path(folder))
            lines += asyncio.run(_measured(shape, model, rounds=asked.rounds, rank=asked.rank))
    how = f"Rank {asked.rank}, all linear layers; {asked.rounds} rounds in turns"
    head = f"{how}: medians, and the best in brackets, for other work ran beside. {described_machine()}."
    print("\n".join([head, "", TABLE, *lines]))


if __name__ == "__main__":
    main()
