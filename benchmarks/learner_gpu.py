"""Training steps of the learner against plain transformers with padding: tokens/s, MFU and peak memory.

    .venv/bin/python -m benchmarks.learner_gpu [--shape 0.5b 1.5b] [--steps N] [--results FILE]
    .venv/bin/python -m benchmarks.learner_gpu --device cpu --shape tiny --tokens 256

For each shape a model of random weights is written, and trained on the same sequences of unequal lengths in both ways:
by the learner, packed into rows of --tokens; and by transformers' own forward pass in microbatches that are padded to
their longest sequence, no larger with their padding. Both minimise the negative log-likelihood of the same tokens, so
that their first losses must agree, which is checked. Padding counts neither as tokens nor as arithmetic.

MFU is the arithmetic of the model (6 per weight and token, and causal attention) over the device's peak in bfloat16;
--tflops says the peak of a device that is not known here. One line for each is appended to --results.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.learner_shapes import SHAPES, QwenShape, write_random_model
from benchmarks.padded_training import PaddedTraining
from learner.algorithms.presets.sft import SftConfig
from learner.training.batch import TrainSequence
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import CommandChannel, Ranks, close_process_group, open_process_group
from learner.training.trainer import Trainer

RESULTS = Path(__file__).with_name("results") / "learner_gpu.jsonl"
LEARNING_RATE = 1e-6
_PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "4090": 165.0}
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02}

Dtype = Literal["float32", "bfloat16"]
Train = Callable[[Sequence[TrainSequence]], float]
"""Trains one step; returns its loss."""


class Measured(BaseModel):
    """Measurements of one way of training one shape; a line of the results."""

    model_config = ConfigDict(frozen=True)

    shape: str
    way: Literal["learner", "padded"]
    settings: str = ""
    device: str
    dtype: Dtype
    pack_tokens: int
    step_tokens: int
    longest: int
    first_loss: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    peak_memory_gib: float | None

    @property
    def told(self) -> str:
        """For the terminal."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        memory = "" if self.peak_memory_gib is None else f", peak {self.peak_memory_gib:.1f} GiB"
        way = f"{self.way} {self.settings}".strip()
        return f"{self.shape} {way}: {self.tokens_per_s:,.0f} tokens/s{mfu}{memory}, step {self.step_s:.3f} s"


@dataclass(frozen=True)
class Workload:
    """Batches of a measurement: `pack_tokens` in a row, `sequences` of at most `longest` tokens in a step."""

    dtype: Dtype
    pack_tokens: int
    sequences: int
    longest: int
    steps: int
    tflops: float | None
    training: Mapping[str, object] = field(default_factory=dict)

    @property
    def adapted(self) -> bool:
        """True if adapters are trained, and no weight of the model."""
        return "lora" in self.training

    def batch(self, shape: QwenShape) -> list[TrainSequence]:
        """Lengths from a sixteenth of the longest on, the same at every call; the first quarter of each is a prompt."""
        draw = np.random.default_rng(0)
        lengths = draw.integers(max(self.longest // 16, 2), self.longest + 1, self.sequences)
        return [
            TrainSequence.supervised(
                token_ids=draw.integers(3, shape.vocabulary, length).astype(np.int32),
                loss_mask=np.arange(length) >= max(length // 4, 1),
            )
            for length in lengths.tolist()
        ]


def main() -> None:
    """Measures the shapes that were asked for, and appends what was found."""
    arguments = _arguments()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device not in (None, found):
        raise SystemExit(f"--device is {arguments.device} and here is {found}: hide a GPU by CUDA_VISIBLE_DEVICES=''")
    workload = Workload(
        dtype=arguments.dtype or ("bfloat16" if found == "cuda" else "float32"),
        pack_tokens=arguments.tokens,
        sequences=arguments.sequences,
        longest=arguments.longest or arguments.tokens // 2,
        steps=arguments.steps,
        tflops=arguments.tflops or known_tflops(),
    )
    commands = open_process_group(Ranks(), timeout_s=600)
    for name in arguments.shape:
        for row in measure(SHAPES[name], workload, commands=commands):
            print(row.told, flush=True)
            if arguments.results is not None:
                _keep(row, arguments.results)
    close_process_group()


def measure(shape: QwenShape, workload: Workload, *, commands: CommandChannel) -> list[Measured]:
    """Both ways, the learner first. Raises AssertionError if their first losses differ."""
    batch = workload.batch(shape)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(shape, Path(folder))
        rows = [
            _measured(shape, "learner", workload, batch, *_learner(model, workload, commands)),
            _measured(shape, "padded", workload, batch, *_padded(model, workload)),
        ]
    gap = abs(rows[0].first_loss - rows[1].first_loss)
    assert gap < _LOSS_TOLERANCE[workload.dtype], f"{shape.name}: the first losses differ by {gap}"
    return rows


def flops(shape: QwenShape, lengths: Sequence[int], *, adapted: bool = False) -> float:
    """Of forward and backward pass over sequences of these lengths, without what is computed again.

    2 for each weight of a matrix product and token, 2 x hidden x length^2 for the causal half of each layer's attention
    forward; backward twice as much, but that frozen weights of an `adapted` model have no gradient.
    """
    tokens = sum(lengths)
    squares = sum(length**2 for length in lengths)
    products = 2.0 * shape.matrix_weights * tokens
    return (2.0 if adapted else 3.0) * products + 6.0 * shape.layers * shape.attention_width * squares


def measure_learner(
    shape: QwenShape, model: Path, workload: Workload, *, commands: CommandChannel, settings: str
) -> Measured:
    """The learner's way alone; `settings` is what `workload.training` is called."""
    row = _measured(shape, "learner", workload, workload.batch(shape), *_learner(model, workload, commands))
    return row.model_copy(update={"settings": settings})


def open_trainer(model: Path, workload: Workload, commands: CommandChannel) -> Trainer:
    """The learner's trainer of supervised steps."""
    settings = {
        "dtype": workload.dtype,
        "optimizer": OptimizerConfig(learning_rate=LEARNING_RATE),
        "microbatch_tokens": workload.pack_tokens,
        "report_entropy": False,
        **workload.training,
    }
    config = TrainingConfig.model_validate(settings)
    return Trainer(model, algorithm=SftConfig(), config=config, ranks=Ranks(), commands=commands)


def _learner(model: Path, workload: Workload, commands: CommandChannel) -> tuple[Train, Callable[[], None]]:
    trainer = open_trainer(model, workload, commands)
    return lambda batch: trainer.train_step(batch, version=0).loss, trainer.close


def _padded(model: Path, workload: Workload) -> tuple[Train, Callable[[], None]]:
    plain = PaddedTraining(
        model,
        device=Ranks().device,
        dtype=getattr(torch, workload.dtype),
        learning_rate=LEARNING_RATE,
        microbatch_tokens=workload.pack_tokens,
    )
    return plain.step, lambda: None


def _measured(
    shape: QwenShape,
    way: Literal["learner", "padded"],
    workload: Workload,
    batch: Sequence[TrainSequence],
    train: Train,
    close: Callable[[], None],
) -> Measured:
    device = Ranks().device
    lengths = [len(sequence.token_ids) for sequence in batch]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first = train(batch)  # not timed: it makes the optimizer's states and picks kernels
    step_s = statistics.median(_timed(train, batch, device) for _ in range(workload.steps))
    arithmetic = flops(shape, lengths, adapted=workload.adapted)
    row = Measured(
        shape=shape.name,
        way=way,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        dtype=workload.dtype,
        pack_tokens=workload.pack_tokens,
        step_tokens=sum(lengths),
        longest=max(lengths),
        first_loss=first,
        step_s=step_s,
        tokens_per_s=sum(lengths) / step_s,
        mfu=None if workload.tflops is None else arithmetic / step_s / (workload.tflops * 1e12),
        peak_memory_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    )
    close()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _timed(train: Train, batch: Sequence[TrainSequence], device: torch.device) -> float:
    _wait_for(device)
    began = time.perf_counter()
    train(batch)
    _wait_for(device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def known_tflops() -> float | None:
    """The peak of the GPU that is here in bfloat16, if it is known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def _keep(row: Measured, results: Path) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(row.model_dump_json() + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="refuse to run on another; what is there if left out")
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in a packed row; %(default)s")
    parser.add_argument("--longest", type=int, help="tokens of the longest sequence; half a row if left out")
    parser.add_argument("--sequences", type=int, default=32, help="sequences of a step; %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed; %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--tflops", type=float, help="the device's peak, dense, in 10^12 operations a second")
    parser.add_argument("--results", type=Path, help=f"lines; {RESULTS.name} beside the others' on a GPU")
    arguments = parser.parse_args()
    if arguments.results is None and torch.cuda.is_available():
        arguments.results = RESULTS
    return arguments


if __name__ == "__main__":
    main()
