"""Recipes of tinker-cookbook, unmodified, against `headway serve`: `python -m benchmarks.cookbook`.

They run one after the other in the cookbook's own environment (`make tinker-cookbook`), on a tiny Qwen3 which has been
taught to answer with some digit in a box. Only `datasets.load_dataset` is replaced, by tables of sums, since recipes
would download theirs: run_recipe.py does that. For each its first and its last value of the metric that it
is to improve are given.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import described_machine

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "tinker-cookbook" / "bin" / "python"
RECIPE = Path(__file__).parent / "run_recipe.py"
RESULTS = ROOT / "benchmarks" / "results" / "tinker_cookbook.md"
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the cookbook knows a renderer for. The tiny model is in a folder of this name."""
_ASKED = re.compile(r"export (TINKER_\w+)=(\S+)")
_LIMIT_S = 600.0
_LOOP = "batch_size=8 group_size=8 max_tokens=12 lora_rank=8 learning_rate=2e-3 max_steps=30"
_RL = "groups_per_batch=8 group_size=8 max_tokens=12 learning_rate=2e-3 lora_rank=8 eval_every=0 save_every=20"


@dataclass(frozen=True)
class Recipe:
    """A recipe: its module, its arguments, and the metric that it is to improve; empty where two steps are all."""

    name: str
    module: str
    arguments: str
    metric: str = ""


_NLL, _REWARD, _MATH_REWARD = "train_mean_nll", "reward/total", "env/all/reward/total"
_MATH = f"env=gsm8k {_RL} max_steps=30"
_SL = "batch_size=8 learning_rate=1e-3 lora_rank=8"
RECIPES = (
    Recipe("sl_loop", "sl_loop", f"{_SL} max_steps=36", _NLL),
    Recipe("sl_basic", "sl_basic", "max_steps=2 lora_rank=4 save_every=1"),
    Recipe("chat_sl", "chat_sl.train", f"{_SL} max_steps=30 eval_every=10", _NLL),
    Recipe("rl_loop, importance_sampling", "rl_loop", f"{_LOOP} loss_fn=importance_sampling", _REWARD),
    Recipe("rl_loop, stable_reinforce", "rl_loop", _LOOP, _REWARD),
    Recipe("rl_loop, gspo", "rl_loop", f"{_LOOP} loss_fn=gspo", _REWARD),
    Recipe("math_rl, ppo", "math_rl.train", f"{_MATH} loss_fn=ppo", _MATH_REWARD),
    Recipe(
        "math_rl, two substeps", "math_rl.train",
        f"{_MATH} loss_fn=importance_sampling compute_post_kl=True num_substeps=2", _MATH_REWARD,
    ),
    Recipe("math_rl, asynchronous", "math_rl.train", f"{_MATH} max_steps_off_policy=2", _MATH_REWARD),
    Recipe(
        "math_rl, streamed minibatches", "math_rl.train",
        f"{_MATH} stream_minibatch_config.groups_per_batch=8 stream_minibatch_config.num_minibatches=4", _MATH_REWARD,
    ),
    Recipe(
        "multiplayer_rl, guess_number", "multiplayer_rl.guess_number.train",
        "batch_size=2 group_size=2 max_tokens=12 max_steps=2 eval_every=0",
    ),
    Recipe(
        "distillation, on-policy", "distillation.on_policy_distillation",
        f"{_RL} max_steps=4 teacher_model={MODEL} dataset=deepmath",
    ),
    Recipe(
        "preference, dpo", "preference.dpo.train",
        "dataset=hhh batch_size=8 learning_rate=1e-3 max_steps=20 max_length=256", "dpo_loss",
    ),
)  # fmt: skip


def main() -> None:
    """Prints a line for each recipe, and writes the table; exits with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="recipes whose names begin so")
    parser.add_argument("--output", type=Path, help=f"file for the table, such as {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        sys.exit("error: build/tinker-cookbook is not there: `make tinker-cookbook` makes it")
    chosen = [each for each in RECIPES if not arguments.only or each.name.startswith(tuple(arguments.only))]
    with tempfile.TemporaryDirectory(prefix="tinker-cookbook-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "benchmarks.cookbook.boxed_digits", folder / MODEL], cwd=ROOT, check=True)
        with _serving(folder) as environment:
            rows = [_ran(recipe, folder, environment) for recipe in chosen]
    text = _table(rows)
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    sys.exit(any(row[2] != "passed" for row in rows))


@contextmanager
def _serving(folder: Path) -> Iterator[Mapping[str, str]]:
    """Starts the server; gives the environment of its clients."""
    command = [str(Path(sys.executable).with_name("headway")), "serve", MODEL, "--name", MODEL, "--port", "7391"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = [line for _, line in zip(range(3), server.stdout, strict=False)]
        yield {**os.environ, **{match[1]: match[2] for line in lines if (match := _ASKED.match(line))}}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


Row = tuple[str, str, str, float, str]


def _ran(recipe: Recipe, folder: Path, environment: Mapping[str, str]) -> Row:
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    common = [f"model_name={MODEL}", f"log_path={logs}"]
    command = [str(PYTHON), str(RECIPE), f"tinker_cookbook.recipes.{recipe.module}", *recipe.arguments.split(), *common]
    began = time.monotonic()
    with (folder / "out").open("w+", encoding="utf-8") as out:
        done = subprocess.run(
            command, cwd=folder, env={**environment, "TINKER_TELEMETRY": "0"}, stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        out.seek(0)
        said = [line.strip() for line in out if line.strip()]
    took = time.monotonic() - began
    outcome = "passed" if done.returncode == 0 else said[-1][:300]
    row = recipe.name, recipe.arguments, outcome, took, _learned(recipe, logs / "metrics.jsonl")
    print(f"{recipe.name}: {outcome} in {took:.0f} s {row[4]}", file=sys.stderr, flush=True)
    return row


def _learned(recipe: Recipe, path: Path) -> str:
    """The metric's mean over the first and over the last fifth of the steps."""
    if not recipe.metric or not path.exists():
        return ""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    values: Sequence[float] = [line[recipe.metric] for line in lines if recipe.metric in line]
    if not values:
        return f"no {recipe.metric}"
    part = max(1, len(values) // 5)
    first, last = sum(values[:part]) / part, sum(values[-part:]) / part
    return f"{recipe.metric} {first:.3f} → {last:.3f}"


def _table(rows: Sequence[Row]) -> str:
    body = "\n".join(
        f"| {name} | `{arguments}` | {outcome} | {took:.0f} | {learned} |"
        for name, arguments, outcome, took, learned in rows
    )
    passed = sum(row[2] == "passed" for row in rows)
    return (
        "# Recipes of tinker-cookbook 0.6.1 against `headway serve`\n\n"
        "`make tinker-cookbook`, then `python -m benchmarks.cookbook --output "
        f"{RESULTS.relative_to(ROOT)}`. {passed} of {len(rows)} came to their end, with the unmodified SDK 0.38, on a "
        "Qwen3 of 2 layers whose tokens are bytes. Metrics are means over the first and the last fifth of the steps.\n"
        f"\n| recipe | arguments | outcome | s | first → last |\n|---|---|---|---|---|\n{body}\n\n"
        f"{described_machine()}.\n"
    )


if __name__ == "__main__":
    main()
