"""Memory of a rank while a model is loaded, whole on every rank or in parts as with ZeRO-3.

    .venv/bin/python -m benchmarks.sharded_load [--ranks 2 8] [--layers N]

A random Llama in float32 is loaded as a policy, and then once more as its reference, by gloo ranks of this machine;
each weight is read once. Of each rank the most memory that it held is taken, less what it held before, with everything
imported and a tiny model loaded in the same way. In parts it is to be at most 1.3 times the model over the number of
ranks, and the largest weight; of policy and reference twice the model. Results go to
benchmarks/results/sharded_load.md.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import described_machine, peak_rss, rss
from benchmarks.rank_processes import some_ranks
from learner.training.config import TrainingConfig
from learner.training.engine import sharder
from learner.training.finite import all_finite
from learner.training.models import new_policy
from learner.training.reference import FrozenPolicy
from learner.training.shards import is_sharded, own_part

RESULTS = Path(__file__).with_name("results")
WAYS = ("whole", "in parts")
_MIB = 1 << 20
_FACTOR = 1.3


@dataclass(frozen=True)
class Loaded:
    """Peaks of memory in MiB above the beginning of each rank, after policy and reference, and seconds."""

    policy: list[float]
    reference: list[float]
    policy_s: float
    reference_s: float


def main() -> None:
    """Runs all cases, prints and writes the table; with --rank it is a rank of one of them."""
    arguments = _arguments()
    if arguments.way:
        _rank(arguments.way, Path(arguments.folder), count=arguments.ranks[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        size, largest = _write_models(Path(folder), layers=arguments.layers)
        found = {(ranks, way): _measured(ranks, way, folder) for ranks in arguments.ranks for way in WAYS}
    report = _report(found, size=size, largest=largest)
    print(report)
    (RESULTS / "sharded_load.md").write_text(report, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _write_models(folder: Path, *, layers: int) -> tuple[int, int]:
    """Bytes of the model, and of its largest weight."""
    for name, sizes in (("tiny", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}), ("model", {})):
        shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers, **sizes}
        config = LlamaConfig(num_attention_heads=4, vocab_size=8192, max_position_embeddings=512, **shape)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder / name)
    sizes_of = [parameter.nbytes for parameter in model.parameters()]
    return sum(sizes_of), max(sizes_of)


def _measured(ranks: int, way: str, folder: str) -> Loaded:
    argv = [sys.executable, "-m", "benchmarks.sharded_load", "--ranks", str(ranks), "--way", way, "--folder", folder]
    ended = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return Loaded(**json.loads(ended.stdout.splitlines()[-1]))


def _rank(way: str, folder: Path, *, count: int) -> None:
    with some_ranks(count) as (ranks, _):
        list(_loads(way, folder / "tiny"))
        gc.collect()
        before = rss()
        peaks, seconds, began = [], [], time.monotonic()
        for models in _loads(way, folder / "model"):
            # Until a weight is read, a file that is mapped has taken no memory.
            assert all(all_finite(own_part(weight)) for model in models for weight in model.parameters())
            dist.barrier()
            seconds.append(time.monotonic() - began)
            peaks.append((peak_rss() - before) / _MIB)
            assert all(map(is_sharded, models[0].parameters())) == (way == "in parts")
        if (found := _of_all_ranks(peaks, count=count)) and ranks.leads:
            print(json.dumps(vars(Loaded(found[0], found[1], seconds[0], seconds[1] - seconds[0]))))


def _loads(way: str, path: Path) -> Iterator[Sequence[nn.Module]]:
    """The policy; then the policy and the reference."""
    config = TrainingConfig(zero_stage=3)
    shard = sharder(config) if way == "in parts" else None
    policy = new_policy(path, config=config, entropy=(False, False), adapted=False, shard=shard)
    yield [policy]
    reference = new_policy(path, config=config, entropy=(False, False), adapted=False, shard=shard)
    frozen = FrozenPolicy(reference, config=config, device=torch.device("cpu")) if shard is not None else None
    yield [policy, reference]
    if frozen is not None:
        frozen.close()


def _of_all_ranks(peaks: Sequence[float], *, count: int) -> list[list[float]]:
    rows = [torch.zeros(len(peaks)) for _ in range(count)]
    dist.all_gather(rows, torch.tensor(peaks))
    return torch.stack(rows).T.tolist()


def _report(found: dict[tuple[int, str], Loaded], *, size: int, largest: int) -> str:
    lines = [
        "# Memory of a rank while a model is loaded",
        "",
        f"`python -m benchmarks.sharded_load`: a Llama of {size / _MIB:.0f} MiB in float32, its largest weight "
        f"{largest / _MIB:.0f} MiB, by gloo ranks on a CPU; without optimizer. Peak MiB above what a rank held before, "
        "rank 0 and the largest of the others. The limit is 1.3 times the model over the ranks (twice that with the "
        "reference) and the largest weight.",
        "",
        "| ranks | way | policy: rank 0 | others | limit | s | and its reference: rank 0 | others | limit | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (ranks, way), seen in found.items():
        limits = [(times * _FACTOR * size / ranks + largest) / _MIB for times in (1, 2)]
        cells = [
            f"{peaks[0]:.0f} | {max(peaks[1:]):.0f} | {limit:.0f} | {seconds:.1f}"
            for peaks, limit, seconds in zip(
                (seen.policy, seen.reference), limits, (seen.policy_s, seen.reference_s), strict=True
            )
        ]
        lines.append(f"| {ranks} | {way} | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, "", f"{described_machine()}.", ""])


if __name__ == "__main__":
    main()
