"""The least time that a step of SmolLM2 can take on this machine: its arithmetic over the speed of torch's matmul.

    python -m benchmarks.step_bound [--completion TOKENS] [--output FILE]

The step is that of `benchmarks.against_trl smollm2`: 4 x 8 completions, sampled and trained once. Counted
are the products with the model's matrices: a prompt once a group, in sampling and in training, without the head; each
token of a completion once in sampling, and in training three times (forward, and backward for inputs and weights).
Attention, norms, the optimizer and everything around them count as nothing. The speed is the best of several runs on
all cores, of large square matrices and of the shape that the model's layers have, for as many rows as the step trains.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from benchmarks.against_trl import SMOLLM2, smollm2_prompts
from benchmarks.machine import described_machine

RESULT = Path(__file__).with_name("results") / "step_bound.md"
GROUPS, GROUP_SIZE = 4, 8
SQUARE = 2048
_RUNS = 12


@dataclass(frozen=True)
class Work:
    """FLOP of a step."""

    sampling: float
    training: float


def work(*, layers: float, head: float, prompt: float, completion: float) -> Work:
    """`layers` and `head` are numbers of weights, `prompt` and `completion` mean lengths in tokens."""
    sampled = GROUPS * GROUP_SIZE * completion
    forward = 2 * (GROUPS * prompt * layers + sampled * (layers + head))
    return Work(sampling=forward, training=3 * forward)


def weights(model: Path) -> tuple[int, int]:
    """Number of weights in the matrices of all layers of a Llama, and in its head."""
    config = AutoConfig.from_pretrained(model)
    hidden, width = config.hidden_size, config.hidden_size // config.num_attention_heads
    attention = 2 * hidden * width * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_hidden_layers * layer, hidden * config.vocab_size


def speed(rows: int, inner: int, columns: int, *, dtype: torch.dtype) -> float:
    """FLOP/s of a product on all cores, the best of some."""
    torch.set_num_threads(os.cpu_count() or 1)
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    took = []
    for _ in range(_RUNS):
        began = time.monotonic()
        torch.mm(left, right)
        took.append(time.monotonic() - began)
    return 2 * rows * inner * columns / min(took)


def main() -> None:
    """Prints it, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_bound", description=__doc__)
    parser.add_argument("--completion", type=float, default=34.0, help="mean tokens of a completion; %(default)s")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in smollm2_prompts(100)]
    prompt = sum(lengths) / len(lengths)
    layers, head = weights(SMOLLM2)
    step = work(layers=layers, head=head, prompt=prompt, completion=given.completion)
    config = AutoConfig.from_pretrained(SMOLLM2)
    rows = round(GROUPS * prompt + GROUPS * GROUP_SIZE * given.completion)
    speeds = {
        name: (
            speed(SQUARE, SQUARE, SQUARE, dtype=dtype),
            speed(rows, config.hidden_size, config.intermediate_size, dtype=dtype),
        )
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    whole = step.sampling + step.training
    text = "\n".join(
        [
            "# The least time of a step of SmolLM2",
            "",
            f"`python -m benchmarks.step_bound --completion {given.completion:g}`, which says what is counted.",
            f"{described_machine()}.",
            "",
            f"Prompts of {prompt:.0f} tokens and completions of {given.completion:.0f}: "
            f"{step.sampling / 1e12:.2f} TFLOP a step in sampling and {step.training / 1e12:.2f} in training.",
            "",
            f"| products of {SQUARE} squared, and of the layers' shape | GFLOP/s | a step at these speeds, s |",
            "|---|---|---|",
            *(
                f"| {name} | {square / 1e9:.0f}, {shaped / 1e9:.0f} | {whole / square:.2f}, {whole / shaped:.2f} |"
                for name, (square, shaped) in speeds.items()
            ),
            "",
        ]
    )
    print(text)
    given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
