"""CPU cost of clients' operations on one base model: each alone, and those of several tenants in shared passes.

    .venv/bin/python -m benchmarks.tenants [--rounds N] [--threads N]

A random Qwen3 of 2 layers x 64, whose output projection is its embedding. Each tenant has an adapter of rank 4, 8 or 12
on all layers, the output projection too. An operation is a forward_backward by cross-entropy of 1 or 8 sequences of 32
tokens. A round runs the operations of all tenants one after another, and then together, and takes a step of each. Times
are CPU milliseconds, which other load disturbs little, the median over the rounds; the gap is of gradients, by their
norm. Results go to benchmarks/results/tenants.md.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import AdamStep, AdapterShape, Array, ClientDatum, ForwardBackward

RESULTS = Path(__file__).with_name("results")
TENANTS, ROWS = (1, 2, 8, 32), (1, 8)
_LENGTH, _VOCABULARY = 32, 320


@dataclass(frozen=True)
class TenantCost:
    """CPU milliseconds of an operation, done alone and with the others, and of a step; passes of the base model for an
    operation, done together; and the largest gap between the gradients of both ways.
    """

    tenants: int
    rows: int
    alone: float
    together: float
    step: float
    passes: float
    gap: float


def main() -> None:
    """Measures all combinations, prints and writes the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = AdapterTrainer.open(written_model(Path(folder)), name="qwen3")
    costs = [measured(trainer, tenants, rows, rounds=arguments.rounds) for rows in ROWS for tenants in TENANTS]
    print_and_write(_report(costs, arguments), RESULTS / "tenants.md")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def written_model(folder: Path) -> Path:
    """A random Qwen3 of 2 layers x 64, whose output projection is its embedding, written to the folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def measured(trainer: AdapterTrainer, tenants: int, rows: int, *, rounds: int) -> TenantCost:
    """The cost for so many tenants, whose operations have so many rows; the first round warms up."""
    names = [f"tenant-{number}" for number in range(tenants)]
    for number, name in enumerate(names):
        trainer.remove(name)
        trainer.create(name, AdapterShape(rank=4 + 4 * (number % 3), seed=number))
    asked = [operation(name, number, rows) for number, name in enumerate(names)]
    timed: dict[str, list[float]] = {"alone": [], "together": [], "step": []}
    gap = passes = 0.0
    for _ in range(rounds + 1):
        began = time.process_time()
        for each in asked:
            trainer.run_round([each])
        timed["alone"].append(time.process_time() - began)
        apart = [_spent(trainer, name) for name in names]
        trainer.passes, began = 0, time.process_time()
        trainer.run_round(asked)
        timed["together"].append(time.process_time() - began)
        passes = trainer.passes / tenants
        shared = [_gradients(trainer.state(name)) for name in names]
        gap = max(gap, *(_gap(one, other) for one, other in zip(apart, shared, strict=True)))
        began = time.process_time()
        for name in names:
            trainer.step(AdamStep(name, learning_rate=1e-3))
        timed["step"].append(time.process_time() - began)
    costs = {name: 1e3 * statistics.median(seconds[1:]) / tenants for name, seconds in timed.items()}
    return TenantCost(tenants, rows, **costs, passes=passes, gap=gap)


def operation(name: str, seed: int, rows: int) -> ForwardBackward:
    """Random tokens, which are to predict random tokens."""
    random = np.random.default_rng(seed)
    data = tuple(
        ClientDatum(
            token_ids=random.integers(0, _VOCABULARY, _LENGTH),
            inputs={
                "target_tokens": random.integers(0, _VOCABULARY, _LENGTH),
                "weights": np.ones(_LENGTH, dtype=np.float32),
            },
        )
        for _ in range(rows)
    )
    return ForwardBackward(name, data, "cross_entropy")


def _spent(trainer: AdapterTrainer, name: str) -> Mapping[str, Array]:
    """Gradients that the model has accumulated, and then forgets: its state is put back without them."""
    state = trainer.state(name)
    kept = {key: value for key, value in state.items() if not key.endswith(".gradient")}
    trainer.restore(name, AdapterShape(rank=4 + 4 * (int(name.split("-")[1]) % 3)), kept)
    return _gradients(state)


def _gradients(state: Mapping[str, Array]) -> Mapping[str, Array]:
    return {key: value for key, value in state.items() if key.endswith(".gradient")}


def _gap(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    apart = sum(float(np.square(one[key] - other[key]).sum()) for key in one)
    whole = sum(float(np.square(value).sum()) for value in one.values())
    return float(np.sqrt(apart / max(whole, 1e-30)))


def _report(costs: Sequence[TenantCost], arguments: argparse.Namespace) -> str:
    lines = [
        "# Tenants on one base model",
        "",
        f"`benchmarks/tenants.py`: {arguments.rounds} rounds, {arguments.threads} thread(s), {_LENGTH} tokens a row. "
        f"{described_machine()}.",
        "",
        "| tenants, rows of each | forward_backward alone, CPU ms | together, CPU ms an operation | "
        "passes an operation | optim_step, CPU ms | gap of gradients |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cost.tenants}, {cost.rows} | {cost.alone:.1f} | {cost.together:.1f} | {cost.passes:.3g} | "
        f"{cost.step:.2f} | {cost.gap:.1e} |"
        for cost in costs
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
