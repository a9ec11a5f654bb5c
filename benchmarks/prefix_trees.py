"""A training step of agents whose contexts begin alike: each beginning once, against a group's prompt once, or nothing.

    python -m benchmarks.prefix_trees [--share 0.8] [--dtype float32] [--steps N] [--output FILE]

Each trajectory has several contexts, of which each begins with a share of the one before it and goes on otherwise, as
those of an agent that edits its history; the first ones of a group have the prompt in common. What is new in a context
is half trained, half given. The model is a random Llama. Each side is a process of its own and trains the same tokens;
they take turns, step by step.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import described_machine
from learner.algorithms.presets.grpo import GrpoConfig
from learner.training import step
from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.config import Dtype, OptimizerConfig, TrainingConfig
from learner.training.packing import Prefixes, SharingOrder, shared_prefixes
from learner.training.ranks import Ranks, open_process_group
from learner.training.trainer import Trainer

WAYS = ("each beginning once", "a group's prompt once", "nothing shared")
SHAPE = LlamaConfig(
    vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
"""Of 17 million parameters."""


@dataclass(frozen=True)
class AgentWorkload:
    """`contexts` of `length` tokens for each of `members` of `groups`; `share` of one is how the one before begins."""

    groups: int
    members: int
    contexts: int
    length: int
    prompt: int
    share: float
    dtype: str
    threads: int

    def batch(self) -> list[TrainSequence]:
        """The contexts as sequences, in the order of groups and members."""
        draws = np.random.default_rng(0)
        made: list[TrainSequence] = []
        for group in range(self.groups):
            prompt = draws.integers(0, SHAPE.vocab_size, self.prompt)
            for _ in range(self.members):
                reward = float(draws.normal())
                tokens = prompt
                for context in range(self.contexts):
                    kept = tokens[: int(self.share * self.length)] if context else prompt
                    tokens = np.concatenate([kept, draws.integers(0, SHAPE.vocab_size, self.length - len(kept))])
                    mask = np.arange(self.length) >= (len(kept) + self.length) // 2
                    made.append(self._sequence(tokens, mask, group=group, continues=context > 0, reward=reward))
        return made

    @staticmethod
    def _sequence(tokens: np.ndarray, mask: np.ndarray, *, group: int, continues: bool, reward: float) -> TrainSequence:
        return TrainSequence(
            token_ids=tokens.astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -float(np.log(SHAPE.vocab_size)), 0.0).astype(np.float32),
            lags=np.zeros(len(tokens), dtype=np.int32),
            group=group,
            continues=continues,
            reward=reward,
        )


def prompts_alone(batch: FlatBatch) -> Prefixes:
    """A prompt is shared by all sequences that have just this one before their first trained token; nothing else is."""
    nodes = np.arange(len(batch.token_ids), dtype=np.int64)
    families: dict[bytes, list[int]] = {}
    for sequence, start in enumerate(batch.starts.tolist()):
        before = int(np.argmax(batch.loss_mask[start : start + int(batch.lengths[sequence])]))
        families.setdefault(batch.token_ids[start : start + before].tobytes(), []).append(sequence)
    order, shared = [], []
    for prompt, family in families.items():
        length, first = len(prompt) // batch.token_ids.itemsize, int(batch.starts[family[0]])
        for sequence in family:
            start = int(batch.starts[sequence])
            nodes[start : start + length] = np.arange(first, first + length)
        order += family
        shared += [0] + [length] * (len(family) - 1)
    return Prefixes(nodes=nodes, sharing=SharingOrder(order=np.array(order), shared=np.array(shared)))


def nothing(batch: FlatBatch) -> Prefixes:
    """Each sequence by itself."""
    count = len(batch.lengths)
    order = SharingOrder(order=np.arange(count), shared=np.zeros(count, dtype=np.int64))
    return Prefixes(nodes=np.arange(len(batch.token_ids)), sharing=order)


BY_WAY: Mapping[str, Callable[[FlatBatch], Prefixes]] = dict(
    zip(WAYS, (shared_prefixes, prompts_alone, nothing), strict=True)
)


def follow(way: str, workload: AgentWorkload, model: Path) -> None:
    """A side: for each line of stdin a step, and a line with its seconds, loss and the most memory so far."""
    torch.set_num_threads(workload.threads)
    module: Any = step
    module.shared_prefixes = BY_WAY[way]
    ranks = Ranks()
    config = TrainingConfig(
        dtype=cast("Dtype", workload.dtype), optimizer=OptimizerConfig(learning_rate=1e-5), microbatch_tokens=8192
    )
    commands = open_process_group(ranks, timeout_s=60)
    trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
    batch = workload.batch()
    for number, _ in enumerate(sys.stdin):
        began, cpu = time.perf_counter(), time.process_time()
        metrics = trainer.train_step(batch, version=number)
        found = {
            "wall": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
            "loss": metrics.loss,
            "trained": metrics.trained_tokens,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print("found", json.dumps(found), flush=True)


def measure(workload: AgentWorkload, *, steps: int) -> Mapping[str, Sequence[Mapping[str, float]]]:
    """Findings of each side in each step but its first, which allocates."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(SHAPE).save_pretrained(folder)
        sides = {way: _started(way, workload, folder) for way in WAYS}
        found: dict[str, list[Mapping[str, float]]] = {way: [] for way in WAYS}
        try:
            for number in range(steps + 1):
                for way, side in sides.items():
                    line = _step(side)
                    if number:
                        found[way].append(line)
        finally:
            for side in sides.values():
                side.kill()
                side.wait()
    return found


def _started(way: str, workload: AgentWorkload, model: str) -> "subprocess.Popen[str]":
    words = ["--side", way, "--workload", json.dumps(asdict(workload)), "--model", model]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.prefix_trees", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _step(side: "subprocess.Popen[str]") -> Mapping[str, float]:
    told, answers = cast("IO[str]", side.stdin), cast("IO[str]", side.stdout)
    told.write("step\n")
    told.flush()
    for line in answers:
        if line.startswith("found "):
            made: Mapping[str, float] = json.loads(line.removeprefix("found "))
            return made
    raise SystemExit(f"a side ended with {side.wait()}")


def report(workload: AgentWorkload, found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """The table: trained tokens a second, their ratio to nothing shared, memory, and how far the losses are apart."""
    batch = flatten(workload.batch())
    tokens = len(batch.token_ids)
    plain = found[WAYS[2]]
    lines = [
        f"## {workload.dtype}, a share of {workload.share:g}",
        "",
        f"{workload.groups} groups of {workload.members}, each of {workload.contexts} contexts of {workload.length} "
        f"tokens, prompts of {workload.prompt}: {tokens} tokens, of which {int(batch.loss_mask.sum())} are trained. "
        f"{described_machine()}; {len(plain)} steps a side, in turns, medians.",
        "",
        "| | tokens computed | trained tokens/s | over nothing shared | CPU s a step | peak MiB | loss, last step |",
        "|---|---|---|---|---|---|---|",
    ]
    usual = statistics.median(each["wall"] for each in plain)
    for way in WAYS:
        wall = statistics.median(each["wall"] for each in found[way])
        cpu = statistics.median(each["cpu"] for each in found[way])
        last = found[way][-1]
        lines.append(
            f"| {way} | {len(np.unique(BY_WAY[way](batch).nodes))} | {last['trained'] / wall:.0f} | "
            f"**{usual / wall:.2f}** | {cpu:.2f} | {last['peak_mib']:.0f} | {last['loss']:.7f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures, prints the table, and appends it to the file of results; or is one of the sides."""
    arguments = _arguments()
    if arguments.side:
        follow(arguments.side, AgentWorkload(**json.loads(arguments.workload)), arguments.model)
        return
    workload = AgentWorkload(
        groups=2, members=4, contexts=arguments.contexts, length=arguments.length, prompt=arguments.prompt,
        share=arguments.share, dtype=arguments.dtype, threads=arguments.threads,
    )  # fmt: skip
    table = report(workload, measure(workload, steps=arguments.steps))
    print(table)
    if arguments.output is not None:
        head = (
            "# Beginnings that sequences share\n\n`python -m benchmarks.prefix_trees`, which says what is compared.\n"
        )
        text = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else head
        arguments.output.write_text(f"{text.rstrip()}\n\n{table}", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.8, help="of a context that the one before began with")
    parser.add_argument("--contexts", type=int, default=7, help="of a trajectory")
    parser.add_argument("--length", type=int, default=500, help="tokens of a context")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file that the table is appended to")
    parser.add_argument("--side", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
