"""Muon and AdamW on one small task, sums of two numbers by supervised fine-tuning, from random weights.

    python -m benchmarks.optimizers [--steps 150] [--seeds 2]

The real trainer with one thread, on a CPU. Each optimizer has the same learning rates, schedule, batches and first
weights. Results go to benchmarks/results/optimizers.md. It says that both learn, and nothing about large models.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import described_machine
from learner.algorithms.presets.sft import SftConfig
from learner.training.batch import TrainSequence
from learner.training.config import OptimizerConfig, OptimizerType, TrainingConfig
from learner.training.ranks import CommandChannel, Ranks, open_process_group
from learner.training.trainer import Trainer

RESULT = Path(__file__).with_name("results") / "optimizers.md"
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TYPES: Sequence[OptimizerType] = ("adamw", "muon")
BATCH, HELD_OUT = 128, 300
PLUS, EQUALS, END = 10, 11, 12
PROMPT, ANSWER = 6, 4
"""Tokens of `37+58=` and of `095` with its end."""


@dataclass(frozen=True)
class TrainedSums:
    """The loss of held-out answers, nats a token; the share of them that sampling gets right; seconds of CPU a step."""

    loss: float
    right: float
    step_s: float


def tokens_of(first: int, second: int) -> list[int]:
    """The text of a sum, a token for each character, such as 37+58=095 and an end."""
    digits = [int(digit) for digit in f"{first:02}{second:02}{first + second:03}"]
    return [*digits[:2], PLUS, *digits[2:4], EQUALS, *digits[4:], END]


def example_of(pair: int) -> TrainSequence:
    """The sum of the pair's first and last two digits, whose answer is trained."""
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    return TrainSequence(
        token_ids=np.array(tokens_of(*divmod(pair, 100)), dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(len(mask), dtype=np.float32),
        lags=np.zeros(len(mask), dtype=np.int32),
        reward=0.0,
    )


def write_model(path: Path, *, seed: int) -> None:
    """A new Llama with two layers."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=END + 1, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")


def run(
    optimizer: OptimizerType, rate: float, *, model: Path, steps: int, seed: int, commands: CommandChannel
) -> TrainedSums:
    """Trains on the pairs that are not held out, which are the same for all of a seed."""
    draws = np.random.default_rng(seed)
    pairs = draws.permutation(10_000)
    settings = OptimizerConfig(
        type=optimizer, learning_rate=rate, schedule="linear", total_updates=steps, warmup_updates=5
    )
    config = TrainingConfig(optimizer=settings, report_entropy=False)
    trainer = Trainer(model, algorithm=SftConfig(), config=config, ranks=Ranks(), commands=commands)
    began = time.process_time()
    for step in range(steps):
        trainer.train_step([example_of(int(pair)) for pair in draws.choice(pairs[HELD_OUT:], BATCH)], version=step)
    spent = time.process_time() - began
    texts = [tokens_of(*divmod(int(pair), 100)) for pair in pairs[:HELD_OUT]]
    answers = np.array(trainer.probe_logprobs(texts)).reshape(HELD_OUT, -1)[:, -ANSWER:]
    trainer.close()
    return TrainedSums(-float(answers.mean()), float(np.exp(answers.sum(axis=1)).mean()), spent / steps)


def _row(optimizer: OptimizerType, rate: float, found: Sequence[TrainedSums]) -> str:
    losses = ", ".join(f"{each.loss:.3f}" for each in found)
    rights = ", ".join(f"{each.right:.3f}" for each in found)
    return f"| {optimizer} | {rate:g} | {losses} | {rights} | {1000 * np.mean([one.step_s for one in found]):.0f} |"


def main() -> None:
    """Runs all of them, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    commands, rows = open_process_group(Ranks(), timeout_s=60), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            write_model(Path(folder) / str(seed), seed=seed)
        for optimizer in TYPES:
            for rate in RATES:
                found = [
                    run(
                        optimizer, rate, model=Path(folder) / str(seed), steps=given.steps, seed=seed, commands=commands
                    )
                    for seed in range(given.seeds)
                ]
                rows.append(_row(optimizer, rate, found))
                print(rows[-1], flush=True)
    head = [
        "# Muon and AdamW on sums of two numbers",
        "",
        f"`{shlex.join(['python', '-m', 'benchmarks.optimizers', *sys.argv[1:]])}`, which says what it is: "
        f"{given.steps} updates of {BATCH} sums, a Llama",
        f"of 2 layers and width 64 from random weights, learning rate falling to 0. {described_machine()}.",
        "",
        "| optimizer | learning rate | held-out loss, by seed | held-out answers right, by seed | CPU of a step, ms |",
        "|---|---|---|---|---|",
    ]
    RESULT.write_text("\n".join([*head, *rows, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
