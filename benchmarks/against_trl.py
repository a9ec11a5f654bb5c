"""Whole runs of Headway and of TRL on one machine, in alternation: the same model, prompts, rewards and settings.

    .venv/bin/python -m benchmarks.against_trl addition [--steps N] [--rounds N] [--trl NAME=VALUE ...]
    .venv/bin/python -m benchmarks.against_trl smollm2 [--steps N] [--rounds N]
    .venv/bin/python -m benchmarks.against_trl smollm2-bfloat16 [--steps N] [--rounds N]

addition: the demo's task and settings, both sides with as many groups, updates and passes over a batch;
completions/s, and the time to a mean reward of 0.9 over 20 steps. `--set` and `--trl` change them (fields of TrlRun).
smollm2: SmolLM2-135M-Instruct in float32, 4 x 8 completions of at most 48 tokens, rewarded for 12 to 18 words;
seconds a step, at a learning rate of nothing, or completions would grow shorter on one side before the other.
smollm2-bfloat16 is the same in bfloat16, which is faster where a CPU has AMX or AVX512_BF16.

TRL runs in a virtual environment of its own with what is fastest for it on a CPU: eager attention, fused AdamW, the
step in one microbatch, no gradient checkpointing, no reference model, all cores. Both count from the beginning of the
first step; models and processes are there then. Tables are appended to benchmarks/results/against_trl.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks.machine import described_machine
from benchmarks.trl_side import NAMED, TrlRun, trl_python
from benchmarks.whole_runs import run_headway
from env_service.environments.jsonl import Addition
from services.process import parent_death_signal

RESULTS = Path(__file__).with_name("results") / "against_trl.md"
HEAD = "# Headway and TRL, whole runs\n\n`benchmarks/against_trl.py`, which says how both are set.\n"
GOAL, OVER = 0.9, 20
SKIPPED = 3
SMOLLM2 = Path("models/smollm2-135m")
ADDITION = Path("models/addition")
NOTHING_LEARNED = 1e-9
"""SmolLM2's rate: its completions stay as long as they are, so that a step is as much work on both sides throughout."""
RUN = """
[learner]
model = "{model}"
groups_per_step = 4
[learner.rollouts]
group_size = 8
max_tokens = 48
[learner.training]
dtype = "{dtype}"
publish_dtype = "{dtype}"
[learner.training.optimizer]
learning_rate = {learning_rate}
[learner.evaluation]
tasks = 0
final_tasks = 0
[learner.checkpoint]
every_steps = 1000
[generator]
model = "{model}"
[generator.engine]
dtype = "{dtype}"
max_model_len = 256
max_num_seqs = 64
[reward-service]
sandbox = "off"
[env-service]
model = "{model}"
capacity = 8
[[env-service.environments]]
name = "sentences"
source = "jsonl"
chat = false
train_file = "tasks.jsonl"
verifier = "length"
"""


@dataclass(frozen=True)
class SideRun:
    """A run of one side: each step's end in seconds after the first one began, its mean reward, completions' mean
    length.
    """

    side: str
    completions: int
    times: tuple[float, ...]
    rewards: tuple[float, ...]
    lengths: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Mean over the steps after the first ones."""
        return (self.times[-1] - self.times[SKIPPED - 1]) / (len(self.times) - SKIPPED)

    @property
    def goal_s(self) -> float | None:
        """Time of the step at which the mean reward of so many steps first reached the goal; None if it never did."""
        for end in range(OVER, len(self.rewards) + 1):
            if statistics.mean(self.rewards[end - OVER : end]) >= GOAL:
                return self.times[end - 1]
        return None


@dataclass(frozen=True)
class TrainingTask:
    """A task that both sides train on. `config` writes Headway's run.toml into a folder."""

    name: str
    trl: Callable[[int], TrlRun]
    config: Callable[[Path], Path]
    options: Callable[[int], dict[str, object]]


def _addition_for_trl(steps: int) -> TrlRun:
    task = Addition()
    tasks = [task.task("train", index) for index in np.random.default_rng(0).permutation(task.train_tasks)]
    return TrlRun(
        model=str(ADDITION),
        dtype="float32",
        prompts=[str(each.prompt) for each in tasks],
        answers=[str(each.verification.arguments["answer"]) for each in tasks],
        steps=steps,
        groups=64,
        group_size=4,
        max_tokens=5,
        learning_rate=5e-4,
        schedule="linear",
        warmup=5,
        beta2=0.999,
        threads=os.cpu_count() or 1,
        updates=2,
        iterations=2,
    )


def _addition_options(steps: int) -> dict[str, object]:
    return {
        "learner.steps": steps,
        "learner.training.optimizer.total-updates": 4 * steps,
        "learner.evaluation.tasks": 0,
        "learner.evaluation.final-tasks": 0,
    }


def smollm2_prompts(count: int) -> list[str]:
    """Questions in the model's chat template."""
    tokenizer, draw = AutoTokenizer.from_pretrained(SMOLLM2), np.random.default_rng(0)
    things = ("apples", "rivers", "kings", "trains", "winter", "chess", "copper", "bread")
    texts = [
        f"Write a short sentence about {draw.choice(things)} and the number {draw.integers(100)}." for _ in range(count)
    ]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) for chat in chats]


def _smollm2_for_trl(steps: int, *, dtype: str) -> TrlRun:
    return TrlRun(
        model=str(SMOLLM2),
        dtype=dtype,
        prompts=smollm2_prompts(4 * steps),
        answers=[],
        steps=steps,
        groups=4,
        group_size=8,
        max_tokens=48,
        learning_rate=NOTHING_LEARNED,
        schedule="constant",
        warmup=0,
        beta2=0.95,
        threads=os.cpu_count() or 1,
    )


def _smollm2_config(folder: Path, *, dtype: str) -> Path:
    wanted = {"minimum": 12, "maximum": 18, "penalty": 0.1}
    lines = [json.dumps({"prompt": prompt, "arguments": wanted}) for prompt in smollm2_prompts(400)]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(RUN.format(model=SMOLLM2.resolve(), dtype=dtype, learning_rate=NOTHING_LEARNED), encoding="utf-8")
    return path


def _smollm2(name: str, *, dtype: str) -> TrainingTask:
    return TrainingTask(
        name,
        partial(_smollm2_for_trl, dtype=dtype),
        partial(_smollm2_config, dtype=dtype),
        lambda steps: {"learner.steps": steps},
    )


SUBJECTS = {
    "addition": TrainingTask(
        "addition", _addition_for_trl, lambda _: Path("examples/addition/run.toml"), _addition_options
    ),
    "smollm2": _smollm2("smollm2", dtype="float32"),
    "smollm2-bfloat16": _smollm2("smollm2-bfloat16", dtype="bfloat16"),
}


def headway_run(subject: TrainingTask, steps: int, settings: Sequence[str] = ()) -> SideRun:
    """`settings` are further ones, NAME=VALUE."""
    with tempfile.TemporaryDirectory() as folder:
        options = subject.options(steps) | dict(setting.split("=", 1) for setting in settings)
        found = run_headway(subject.config(Path(folder)), folder=Path(folder), options=options).of_kind("step")
    return SideRun(
        side="Headway",
        completions=int(found[0]["trajectories"]),
        times=tuple(step["time_s"] for step in found),
        rewards=tuple(step["reward_mean"] for step in found),
        lengths=tuple(step["length_mean"] for step in found),
    )


def trl_run(subject: TrainingTask, steps: int, settings: Sequence[str] = ()) -> SideRun:
    """In TRL's own virtual environment; `settings` are as of `headway_run`, with values in JSON. Raises SystemExit with
    its last words if it fails.
    """
    changed = {name: json.loads(value) for name, value in (setting.split("=", 1) for setting in settings)}
    given = replace(subject.trl(steps), **changed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "given.json").write_text(json.dumps(asdict(given)), encoding="utf-8")
        command = [str(trl_python()), "-m", "benchmarks.trl_side", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, preexec_fn=parent_death_signal
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        steps_found = json.loads((Path(folder) / "steps.json").read_text(encoding="utf-8"))
    return SideRun(
        side="TRL", completions=given.groups * given.group_size, **{k: tuple(v) for k, v in steps_found.items()}
    )


def report(subject: TrainingTask, runs: Sequence[SideRun], *, steps: int, others: Sequence[str] = ()) -> str:
    """The ratios first, then what they are made of; `others` are settings that are not the subject's own."""
    sides = {side: [run for run in runs if run.side == side] for side in ("Headway", "TRL")}
    step_s = {side: statistics.median(run.step_s for run in some) for side, some in sides.items()}
    goals = {side: [run.goal_s for run in some] for side, some in sides.items()}
    lines = [
        f"## {subject.name}",
        "",
        f"{described_machine()}; {steps} steps a run, the runs in turns, the first {SKIPPED} steps not counted.",
        f"TRL is {NAMED}." + (f" Settings changed: {', '.join(others)}." if others else ""),
        "",
        f"- A step of TRL's takes **{step_s['TRL'] / step_s['Headway']:.2f} times** as long as Headway's.",
    ]
    if subject.name == "addition":
        lines.append(f"- {_goal_line(goals)}")
    lines += [
        "",
        f"| run | s a step | completions/s | mean tokens | reward, first and last {OVER} steps | s to reward {GOAL} |",
        "|---|---|---|---|---|---|",
        *map(_row, runs),
        "",
    ]
    return "\n".join(lines)


def _goal_line(goals: dict[str, list[float | None]]) -> str:
    reached = {side: [found for found in some if found is not None] for side, some in goals.items()}
    if not all(reached.values()):
        short = " and ".join(side for side, some in reached.items() if not some)
        return f"Mean reward {GOAL} was not reached in these steps by {short}."
    ratio = statistics.median(reached["TRL"]) / statistics.median(reached["Headway"])
    return f"To a mean reward of {GOAL} over {OVER} steps TRL takes **{ratio:.2f} times** as long as Headway."


def _row(run: SideRun) -> str:
    first, last = statistics.mean(run.rewards[:OVER]), statistics.mean(run.rewards[-OVER:])
    goal = "not reached" if run.goal_s is None else f"{run.goal_s:.0f}"
    return (
        f"| {run.side} | {run.step_s:.3f} | {run.completions / run.step_s:.1f} | {statistics.mean(run.lengths):.1f} | "
        f"{first:.3f}, {last:.3f} | {goal} |"
    )


def main() -> None:
    """Runs both, in turns, and appends the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=sorted(SUBJECTS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=("Headway", "TRL"), default=("Headway", "TRL"))
    parser.add_argument("--set", nargs="*", default=(), metavar="NAME=VALUE", help="further settings of Headway's run")
    parser.add_argument("--trl", nargs="*", default=(), metavar="NAME=VALUE", help="other settings of TRL's run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--raw", type=Path, help="a file to which each run's times, rewards and lengths are added, as JSON"
    )
    arguments = parser.parse_args()
    subject, runs, table = SUBJECTS[arguments.subject], [], ""
    before = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else HEAD
    for _ in range(arguments.rounds):
        for side in arguments.sides:
            run = (
                headway_run(subject, arguments.steps, arguments.set)
                if side == "Headway"
                else trl_run(subject, arguments.steps, arguments.trl)
            )
            runs.append(run)
            print(f"{side}: {_row(run)}", flush=True)
            if arguments.raw is not None:
                with arguments.raw.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
        if len(arguments.sides) > 1:  # after each round, so that one that is ended early leaves a table
            table = report(subject, runs, steps=arguments.steps, others=[*arguments.set, *arguments.trl])
            arguments.output.write_text(f"{before.rstrip()}\n\n{table}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
