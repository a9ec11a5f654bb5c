"""Two steps of each algorithm of tests/learner/training on this device, and on a CPU in float32: do they agree?

The CPU's are taken by a process that sees no GPU, at the same time: DeepSpeed knows one kind of device in a process.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import say
from learner.training.ranks import Ranks, close_process_group, open_process_group
from tests.learner.training.algorithm_cases import ALGORITHM_CASES
from tests.learner.training.test_algorithm_steps import trainer
from tests.learner.training.tiny_model import write_tiny_llama

LOSS_TOLERANCE = 1e-3
WEIGHT_TOLERANCE = 1e-3
_SEEN = "seen.json"
_WEIGHTS = "weights.safetensors"
_LIMIT_S = 170.0


def write_models(folder: Path) -> None:
    """The student, and a teacher that is another model."""
    student = write_tiny_llama(folder / "student", tied=True)
    model = AutoModelForCausalLM.from_pretrained(student)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "teacher")


def take(models: Path, out: Path) -> None:
    """Takes the steps on the device that is here, and writes losses, norms, metrics and weights of each case."""
    torch.set_num_threads(1)
    commands = open_process_group(Ranks(), timeout_s=60)
    seen: dict[str, object] = {}
    weights: dict[str, torch.Tensor] = {}
    for number, (algo, sequences, training) in enumerate(ALGORITHM_CASES):
        name = f"{algo['type']}-{number}"
        teachers = [models / "teacher"] if algo["type"] in ("opd", "distill") else []
        try:
            with trainer(models / "student", commands, algo, teachers=teachers, training=training) as made:
                steps = [made.train_step(sequences(16), version=version) for version in range(2)]
                weights |= {f"{name}/{each.name}": each.value for each in made.host_copy().tensors}
            seen[name] = [{"loss": step.loss, "grad_norm": step.grad_norm, **step.means} for step in steps]
        except (RuntimeError, ValueError, TypeError) as error:  # the other cases go on
            seen[name] = f"{type(error).__name__}: {error}"
    out.mkdir(parents=True, exist_ok=True)
    (out / _SEEN).write_text(json.dumps(seen), encoding="utf-8")
    save_file(weights, out / _WEIGHTS)
    close_process_group()


def compare(here: Path, there: Path) -> int:
    """Says how far they are apart; the number of cases that differ."""
    ours, theirs = (json.loads((folder / _SEEN).read_text(encoding="utf-8")) for folder in (here, there))
    weights, expected = (load_file(folder / _WEIGHTS) for folder in (here, there))
    wrong, worst_loss, worst_weight = 0, ("", 0.0), ("", 0.0)
    for name, steps in ours.items():
        if isinstance(steps, str) or isinstance(theirs[name], str):
            wrong += 1
            say(name, f"here: {steps}; on a CPU: {theirs[name]}"[:600], "failed")
            continue
        loss = max(abs(one["loss"] - other["loss"]) for one, other in zip(steps, theirs[name], strict=True))
        of_case = {key: value for key, value in weights.items() if key.startswith(f"{name}/")}
        weight = max(float((value - expected[key]).abs().max()) for key, value in of_case.items())
        worst_loss, worst_weight = max(worst_loss, (name, loss), key=_gap), max(worst_weight, (name, weight), key=_gap)
        if not (loss <= LOSS_TOLERANCE and weight <= WEIGHT_TOLERANCE):
            wrong += 1
            say(name, f"losses {loss:.1e} apart, weights after two steps {weight:.1e}", "failed")
    say(
        f"{len(ours)} cases, float32, two steps, against a CPU",
        f"{len(ours) - wrong} agree; losses at most {worst_loss[1]:.1e} apart ({worst_loss[0]}), weights at most "
        f"{worst_weight[1]:.1e} ({worst_weight[0]})",
        "failed" if wrong else "passed",
    )
    return wrong


def _gap(found: tuple[str, float]) -> float:
    return found[1]


def main() -> int:
    """1 if a case differs."""
    if len(sys.argv) > 3 and sys.argv[1] == "--take":
        take(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        models, here, there = (Path(folder) / name for name in ("models", "here", "there"))
        write_models(models)
        other = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.steps", "--take", str(models), str(there)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        )
        take(models, here)
        if other.wait(_LIMIT_S):
            raise RuntimeError(f"the process without a GPU ended with {other.returncode}")
        return min(compare(here, there), 1)


if __name__ == "__main__":
    sys.exit(main())
