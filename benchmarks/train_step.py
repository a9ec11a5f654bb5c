"""Cost of a training step: ours, plain transformers' and TRL's, on the same tokens.

    .venv/bin/python -m benchmarks.train_step [--model DIR] [--dtype bfloat16] [--threads N] [--output FILE] ...

Each side is a process of its own that stays, and they take turns, step by step. Ours has groups that share their
prompts, as a run does, and once more the same lengths without anything in common. Plain transformers has eager
attention, right-padded rectangles and fused AdamW; TRL, in a virtual environment that is made at the first time, its
GRPO step with the same, no KL, and one microbatch. Both keep weights and AdamW's means in the type of the forward pass,
ours keeps them in float32. Times are medians; CPU seconds are disturbed little by other load on the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO

from benchmarks.machine import described_machine
from benchmarks.step_sides import Given
from benchmarks.trl_side import NAMED, trl_python
from services.process import huge_pages

SIDES = {
    "ours": "Headway",
    "ours-different": "Headway, prompts all different",
    "transformers": "transformers, padded",
    "trl": NAMED,
}
HEAD = "# The training step against transformers and TRL\n\n`benchmarks/train_step.py`, which says what each side is.\n"


class StepSide:
    """A process that makes a step when asked to."""

    def __init__(self, name: str, given: Given) -> None:
        python = str(trl_python()) if name == "trl" else sys.executable
        ours = {**huge_pages(os.environ), "GOMP_SPINCOUNT": "0"} if name.startswith("ours") else {}
        environment = {"OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", **ours}
        self._name = name
        self._child = subprocess.Popen(
            [python, "-m", "benchmarks.step_sides", name, json.dumps(asdict(given))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self.walls: list[float] = []
        self.cpus: list[float] = []

    def step(self, *, counts: bool) -> None:
        """Has the side make a step; the first ones, which allocate, do not count."""
        _pipe(self._child.stdin).write("step\n")
        _pipe(self._child.stdin).flush()
        line = _pipe(self._child.stdout).readline()
        while line and not line.startswith('{"wall"'):
            line = _pipe(self._child.stdout).readline()
        if not line:
            raise SystemExit(f"the side {self._name} ended with {self._child.wait()}")
        found = json.loads(line)
        if counts:
            self.walls.append(found["wall"])
            self.cpus.append(found["cpu"])

    def close(self) -> None:
        """Has it end."""
        _pipe(self._child.stdin).close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "asked for when the process was started"
    return stream


def main() -> None:
    """Prints a table, and appends it to the file of results."""
    arguments = _arguments()
    given = Given(**{name: getattr(arguments, name) for name in Given.__dataclass_fields__})
    sides = {name: StepSide(name, given) for name in SIDES if name in arguments.sides}
    try:
        for number in range(arguments.steps + arguments.warmup):
            for side in sides.values():
                side.step(counts=number >= arguments.warmup)
    finally:
        for side in sides.values():
            side.close()
    table = report(given, sides, steps=arguments.steps)
    print(table)
    if arguments.output is not None:
        text = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else HEAD
        arguments.output.write_text(f"{text.rstrip()}\n\n{table}", encoding="utf-8")


def report(given: Given, sides: dict[str, StepSide], *, steps: int) -> str:
    """The ratios first, then what they are made of."""
    lengths = given.lengths()
    tokens = given.prompt * len(lengths) + sum(lengths)
    once = given.prompt * given.groups + sum(lengths)
    padded = len(lengths) * (given.prompt + max(lengths))
    ours = sides["ours"]
    lines = [
        f"## {Path(given.model).name}, {given.dtype}, {given.threads} threads",
        "",
        f"{given.groups} groups of {given.group_size}, prompts of {given.prompt} tokens, completions of "
        f"{given.shortest} to {given.longest}. {described_machine()}; {steps} steps a side, in turns.",
        "",
        "| | CPU over ours | time over ours | CPU s a step | s a step |",
        "|---|---|---|---|---|",
    ]
    cpu, wall = statistics.median(ours.cpus), statistics.median(ours.walls)
    for name, side in sides.items():
        of_cpu, of_wall = statistics.median(side.cpus), statistics.median(side.walls)
        lines.append(
            f"| {SIDES[name]} | **{of_cpu / cpu:.2f}** | {of_wall / wall:.2f} | {of_cpu:.3f} | {of_wall:.3f} |"
        )
    lines += [
        "",
        f"Limit: {tokens} tokens have a place in the sequences, {padded} with padding, {once} if each prompt is "
        f"computed once. By tokens alone the padded sides would need {padded / once:.2f} times ours, and ours with "
        f"different prompts {tokens / once:.2f} times.",
        "",
    ]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/addition")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6, help="tokens")
    parser.add_argument("--shortest", type=int, default=4, help="tokens of a completion")
    parser.add_argument("--longest", type=int, default=4, help="tokens of a completion")
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument("--output", type=Path, help="file that the table is appended to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
