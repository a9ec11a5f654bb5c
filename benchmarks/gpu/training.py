"""Training steps of the learner on random models of Qwen3's shapes: tokens/s, MFU, peak memory, and where time goes.

    .venv/bin/python -m benchmarks.gpu.training [--shapes 0.6b 1.7b] [--settings NAME ...] [--profiled NAME ...]

The numbers are those of `benchmarks.learner_gpu`, in bfloat16, for settings that a user chooses between. Of one setting
a step is looked at by torch's profiler.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.rows import REHEARSAL, rehearses, say
from benchmarks.learner_gpu import Workload, known_tflops, measure, measure_learner, open_trainer
from benchmarks.learner_shapes import SHAPES, QwenShape, write_random_model
from learner.training.ranks import CommandChannel, Ranks, close_process_group, open_process_group

SETTINGS: dict[str, dict[str, object]] = {
    "ZeRO-1": {},
    "ZeRO-1, compiled": {"compile": True},
    "ZeRO-1, checkpointing": {"gradient_checkpointing": True},
    "ZeRO-1, checkpointing, compiled": {"gradient_checkpointing": True, "compile": True},
    "ZeRO-2, checkpointing": {"gradient_checkpointing": True, "zero_stage": 2},
    "ZeRO-3, checkpointing": {"gradient_checkpointing": True, "zero_stage": 3},
    "LoRA 16": {"lora": {"rank": 16}},
    "LoRA 16, compiled": {"lora": {"rank": 16}, "compile": True},
    "LoRA 16, checkpointing": {"lora": {"rank": 16}, "gradient_checkpointing": True},
}
PROFILED = ("ZeRO-1, checkpointing", "ZeRO-1, compiled")
_TOP = 14


def workload(*, tiny: bool) -> Workload:
    """Sequences of up to half a row."""
    if tiny:
        return Workload(dtype="bfloat16", pack_tokens=128, sequences=4, longest=64, steps=1, tflops=1.0)
    return Workload(dtype="bfloat16", pack_tokens=8192, sequences=16, longest=4096, steps=2, tflops=known_tflops())


def settings_of(
    shape: QwenShape, model: Path, work: Workload, commands: CommandChannel, *, names: Sequence[str]
) -> None:
    """Says a row for each setting; one that does not fit, or fails, does not keep the others from running."""
    for settings in names:
        training = SETTINGS[settings]
        try:
            row = measure_learner(shape, model, replace(work, training=training), commands=commands, settings=settings)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            say(f"{shape.name} {settings}", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", "failed")
            continue
        finally:
            free_memory()
        what, _, found = row.told.partition(": ")
        say(what, f"{found} of {row.step_tokens} tokens, loss {row.first_loss:.3f}")


def profiled(shape: QwenShape, model: Path, work: Workload, commands: CommandChannel, *, settings: str) -> None:
    """Says which kernels a step spends the GPU's time in."""
    trainer = open_trainer(model, replace(work, training=SETTINGS[settings]), commands)
    batch = work.batch(shape)
    trainer.train_step(batch, version=0)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    began = time.perf_counter()
    with profile(activities=activities) as found:
        step = trainer.train_step(batch, version=1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    wall_s = time.perf_counter() - began
    trainer.close()
    del trainer
    free_memory()
    # The operations that launched them have their time, too.
    kernels = [each for each in found.key_averages() if each.device_type == DeviceType.CUDA]
    busy_s = sum(each.self_device_time_total for each in kernels) / 1e6
    parts = f"forward and backward {step.forward_backward_s:.2f} s, optimizer {step.optimizer_s:.2f} s"
    say(f"{shape.name} {settings}, profiled", f"{wall_s:.2f} s, GPU busy {busy_s:.2f} s; {parts}")
    for each in sorted(kernels, key=lambda kernel: -kernel.self_device_time_total)[:_TOP]:
        seconds = each.self_device_time_total / 1e6
        say(
            f"{shape.name} {settings}, kernel",
            f"{seconds / busy_s:.1%}, {seconds * 1e3:.0f} ms, {each.count} calls: {each.key[:110]}",
        )


def free_memory() -> None:
    """Gives back what is held by nothing but cycles: the next setting's peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Says all shapes, the smaller one first, beside plain transformers."""
    tiny, given = rehearses(), _arguments()
    work = workload(tiny=tiny)
    commands = open_process_group(Ranks(), timeout_s=120)
    for name in ("tiny-qwen3",) if tiny else given.shapes:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as folder:
            model = write_random_model(shape, Path(folder))
            settings_of(shape, model, work, commands, names=given.settings)
            for settings in given.profiled:
                profiled(shape, model, work, commands, settings=settings)
    if not given.partly:
        padded = measure(SHAPES["tiny" if tiny else "0.5b"], work, commands=commands)[-1]
        say("0.5b, plain transformers with padding, no master weights", padded.told.partition(": ")[2])
    close_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["0.6b", "1.7b"])
    parser.add_argument("--settings", nargs="*", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--profiled", nargs="*", choices=tuple(SETTINGS), default=list(PROFILED))
    parser.add_argument("--partly", action="store_true", help="without plain transformers beside it")
    parser.add_argument(REHEARSAL, action="store_true", help="on a CPU, tiny: shows that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
