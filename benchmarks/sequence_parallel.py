"""Memory of a rank for the activations of one long sequence, by how many ranks share it and what is recomputed.

    .venv/bin/python -m benchmarks.sequence_parallel [--ranks 1 2 4] [--tokens N]

A random Llama in float32 makes the forward and backward pass of a row of one sequence, by gloo ranks of this machine,
each with one thread. Of each rank the most memory that it held during both passes is taken, less what it held before,
with a shorter row passed and the gradients' memory there. Seconds are those of its CPU: ranks share the cores, so that
those of the clock say nothing. Losses and gradients are compared with those of one rank that recomputes nothing.
Results go to benchmarks/results/sequence_parallel.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import described_machine, peak_rss, rss
from benchmarks.rank_processes import some_ranks
from learner.training.batch import TrainSequence, flatten
from learner.training.config import TrainingConfig
from learner.training.models import new_policy
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import PolicyModel
from learner.training.sequence_groups import SequenceGroup

RESULTS = Path(__file__).with_name("results")
WAYS: Mapping[str, Mapping[str, bool]] = {
    "all kept": {},
    "recomputed": {"gradient_checkpointing": True},
    "recomputed but for attention": {"gradient_checkpointing": True, "recompute_attention": False},
}
_SHORT, _PROMPT = 64, 0.25
_MIB = 1 << 20
_VOCABULARY = 4096


@dataclass(frozen=True)
class Passed:
    """Of each rank the peak in MiB and CPU seconds; the loss, and the length of the whole gradient."""

    peaks: list[float]
    seconds: list[float]
    loss: float
    slope: float


def main() -> None:
    """Runs all cases, prints and writes the table; with --folder it is a rank of some of them."""
    arguments = _arguments()
    if arguments.folder:
        _rank(arguments.way, Path(arguments.folder), count=arguments.ranks[0], tokens=arguments.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), layers=arguments.layers, tokens=arguments.tokens)
        found = {
            ranks: {way: _measured(ranks, way, folder, tokens=arguments.tokens) for way in WAYS}
            for ranks in arguments.ranks
        }
    report = _report(found, tokens=arguments.tokens, layers=arguments.layers)
    print(report)
    (RESULTS / "sequence_parallel.md").write_text(report, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _write_model(folder: Path, *, layers: int, tokens: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
        max_position_embeddings=tokens,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _measured(ranks: int, way: str, folder: str, *, tokens: int) -> Passed:
    """In processes of its own: what others have freed would be there already."""
    options = ["--ranks", str(ranks), "--tokens", str(tokens), "--folder", folder, "--way", way]
    argv = [sys.executable, "-m", "benchmarks.sequence_parallel", *options]
    ended = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return Passed(**json.loads(ended.stdout.splitlines()[-1]))


def _rank(way: str, folder: Path, *, count: int, tokens: int) -> None:
    with some_ranks(count) as (ranks, _):
        group = SequenceGroup.opened(count, timeout_s=600)
        config = TrainingConfig.model_validate({"sequence_parallel": count, **WAYS[way]})
        policy = new_policy(folder, config=config, entropy=(False, False), adapted=False, group=group)
        found = _passed(policy, tokens=tokens)
        if ranks.leads:
            print(json.dumps(vars(found)))


def _passed(policy: PolicyModel, *, tokens: int) -> Passed:
    _pass(policy, _row(_SHORT))
    for parameter in policy.parameters():
        assert parameter.grad is not None, "it has been through a backward pass"
        parameter.grad.zero_()
    row = _row(tokens)
    dist.barrier()
    before, began = rss(), time.process_time()
    loss = _pass(policy, row)
    own = torch.tensor([(peak_rss() - before) / _MIB, time.process_time() - began])
    rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    peaks, seconds = torch.stack(rows).T.tolist()
    gradient = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])
    dist.all_reduce(gradient)
    return Passed(peaks=peaks, seconds=seconds, loss=loss, slope=float(gradient.double().norm()))


def _pass(policy: PolicyModel, row: Microbatch) -> float:
    loss = -policy(row)[0].sum()
    loss.backward()
    return float(loss.detach())


def _row(tokens: int) -> Microbatch:
    """Of one sequence, a prompt and an answer."""
    drawn = np.random.default_rng(0).integers(0, _VOCABULARY, tokens).astype(np.int32)
    sequence = TrainSequence.supervised(token_ids=drawn, loss_mask=np.arange(tokens) >= _PROMPT * tokens)
    batch = flatten([sequence])
    return pack(batch, np.zeros(1, dtype=np.int64), prefixes=shared_prefixes(batch))


def _report(found: Mapping[int, Mapping[str, Passed]], *, tokens: int, layers: int) -> str:
    first = next(iter(found[min(found)].values()))
    lines = [
        "# Memory of a rank for a long sequence",
        "",
        f"`python -m benchmarks.sequence_parallel`: forward and backward pass of one sequence of {tokens} tokens, a "
        f"quarter of them a prompt, through a Llama of {layers} layers, width 256, in float32, by gloo ranks on a CPU "
        "that share the sequence (`learner.training.sequence_parallel`). Peak MiB above what a rank held before, the "
        "largest of all ranks, and as a share of one rank's; CPU seconds of a rank on average. The last columns are "
        "the gaps to one rank that keeps everything, as shares.",
        "",
        "| ranks | activations | peak MiB | share | CPU s | gap of the loss | of the gradient's length |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, ways in found.items():
        for way, seen in ways.items():
            alone = max(found[min(found)][way].peaks)
            gaps = [abs(one / other - 1) for one, other in ((seen.loss, first.loss), (seen.slope, first.slope))]
            lines.append(
                f"| {ranks} | {way} | {max(seen.peaks):.0f} | {max(seen.peaks) / alone:.2f} | "
                f"{_mean(seen.seconds):.1f} | {gaps[0]:.1e} | {gaps[1]:.1e} |"
            )
    what = (
        "Activations that wait in host memory (`learner.training.offload_activations`) are not in the table: on a CPU "
        "they are in it anyway."
    )
    return "\n".join([*lines, "", what, "", f"{described_machine()}.", ""])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
