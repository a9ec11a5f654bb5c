"""Self-distillation on addition: a policy that is its own teacher, which is shown the answer, against rewards.

    python -m benchmarks.self_distillation FOLDER [--steps 500] [--runs 3 | --report]
    headway up FOLDER/run.toml

Makes a policy that can copy an answer from its prompt, `085=37+48=` is continued with `085`, and of sums without one
knows what `models/addition` does; and the run file of a run that trains it on its own likeliest tokens. With `--runs`
each of SIDES has so many runs from that policy, of as many completions a step, and the results go to
benchmarks/results/self_distillation.{json,md}.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.machine import described_machine, machines_of
from benchmarks.whole_runs import RunFiles, run_headway, tokens_to, with_steps
from env_service.environments.jsonl import split

ROOT = Path(__file__).parents[1]
BASE = ROOT / "models" / "addition"
_BATCH = 64
_EOS, _FIRST_DIGIT, _PLUS, _EQUALS = 1, 3, 13, 14
_RUN = """
[run]
name = "self"
directory = "{folder}/runs"

[learner]
model = "{model}"
steps = 60
groups_per_step = {groups}
max_lag = 2
rollouts = {{ group_size = {size}, max_tokens = 5 }}
evaluation = {{ tasks = 1000, every_steps = 10, final_tasks = 1000 }}
training.optimizer = {{ learning_rate = {rate} }}
algo = {algo}
teachers = [{teacher}]

[generator]
model = "{model}"
engine = {{ dtype = "float32", max_model_len = 64, max_num_seqs = 64, kv_cache_gb = 0.25 }}

[reward-service]
sandbox = "off"

[env-service]
model = "{model}"
environments = [{{ source = "addition"{hint} }}]
"""
_HINT = ', teacher_hint = "{privileged}="'
_SELF, _AVERAGE = '{ name = "self", policy = true }', '{ name = "self", policy = true, average = 0.99 }'
TARGET = 0.5
"""Accuracy to which tokens are counted."""
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class LearningSide:
    """A way to learn: settings of the run file. `size` is of a group; all have 64 completions a step."""

    algo: str
    teacher: str
    size: int
    rate: float

    def run_file(self, folder: Path) -> str:
        """The run file of the policy that is in `folder`/model."""
        return _RUN.format(
            folder=folder, model=folder / "model", groups=64 // self.size, size=self.size, rate=self.rate,
            algo=self.algo, teacher=self.teacher, hint=_HINT if self.teacher else "",
        )  # fmt: skip


SIDES: Mapping[str, LearningSide] = {
    "itself, shown the answer": LearningSide(
        '{ type = "opd", divergence = "forward_kl", teacher_tokens = 8 }', _SELF, size=2, rate=3e-5
    ),
    "its average, shown the answer": LearningSide(
        '{ type = "opd", divergence = "forward_kl", teacher_tokens = 8 }', _AVERAGE, size=2, rate=1e-4
    ),
    "grpo": LearningSide('{ type = "grpo" }', "", size=8, rate=3e-4),
    "grpo and itself": LearningSide(
        '{ type = "grpo", teacher_weight = 0.1, teacher_divergence = "forward_kl", teacher_tokens = 8 }',
        _SELF, size=8, rate=3e-4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TaughtRun:
    """Numbers of a run that has ended. `accuracies` are held out, by step; `sampled` the tokens up to each of these."""

    side: str
    seed: int
    machine: str
    accuracies: dict[int, float]
    sampled: dict[int, int]
    seconds: float

    @property
    def reached(self) -> int | None:
        """Tokens sampled up to the first evaluation of TARGET; None if there was none."""
        return tokens_to(TARGET, self.accuracies, self.sampled)


def digits(number: int, width: int) -> list[int]:
    """The tokens of a number with so many digits."""
    return [_FIRST_DIGIT + int(digit) for digit in f"{number:0{width}d}"]


def question(pair: int) -> list[int]:
    """The tokens of a sum without its answer."""
    left, right = divmod(pair, 100)
    return [*digits(left, 2), _PLUS, *digits(right, 2), _EQUALS]


@torch.no_grad()
def continued(model: PreTrainedModel, prompts: list[list[int]], *, greedy: bool) -> torch.Tensor:
    """Four tokens behind each prompt, all of one length: [N, 4]."""
    token_ids = torch.tensor(prompts)
    for _ in range(4):
        logits = model(token_ids).logits[:, -1]
        following = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        token_ids = torch.cat([token_ids, following[:, None]], dim=1)
    return token_ids[:, -4:]


def accuracy(model: PreTrainedModel, pairs: list[int], *, hinted: bool) -> float:
    """The share of sums that are right with the likeliest tokens, where the answer is in the prompt, or is not."""
    sums = [sum(divmod(pair, 100)) for pair in pairs]
    hints = [[*digits(total, 3), _EQUALS] if hinted else [] for total in sums]
    prompts = [hint + question(pair) for hint, pair in zip(hints, pairs, strict=True)]
    expected = torch.tensor([[*digits(total, 3), _EOS] for total in sums])
    return float((continued(model, prompts, greedy=True) == expected).all(-1).float().mean())


def train(model: PreTrainedModel, *, steps: int) -> None:
    """Teaches it to copy any number from before a sum, and to go on as it does where there is none."""
    pairs, _ = split()
    own = [row.tolist() for row in continued(model, [question(pair) for pair in pairs], greedy=False)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    chance = random.Random(0)
    for step in range(steps):
        rows, hinted = [], step % 2 == 0
        for at in chance.choices(range(len(pairs)), k=_BATCH):
            number = digits(chance.randrange(199), 3)
            rows.append(
                [*number, _EQUALS, *question(pairs[at]), *number, _EOS] if hinted else question(pairs[at]) + own[at]
            )
        token_ids = torch.tensor(rows)
        logits = model(token_ids[:, :-1]).logits[:, -4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, -4:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def main() -> None:
    """Makes the policy and its run file, and the runs where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500, help="of the training that makes the policy")
    parser.add_argument("--runs", type=int, default=0, help="of each side, from as many seeds")
    parser.add_argument("--report", action="store_true", help="only rewrite the table of runs that were made")
    given = parser.parse_args()
    if given.report:
        _write(_read())
        return
    folder = given.folder.absolute()
    _make(folder / "model", steps=given.steps)
    (folder / "run.toml").write_text(SIDES["itself, shown the answer"].run_file(folder), encoding="utf-8")
    runs: list[TaughtRun] = []
    for seed in range(given.runs):
        for side in SIDES:
            runs.append(_run(side, seed, folder))
            _write(runs)
    if runs:
        print(table(runs))


def _make(model_folder: Path, *, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    _, evaluation = split()
    train(model, steps=steps)
    model.save_pretrained(model_folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BASE / name, model_folder / name)
    for hinted in (True, False):
        print(f"{'with' if hinted else 'without'} the answer: {accuracy(model, evaluation, hinted=hinted):.3f} right")


def _run(side: str, seed: int, folder: Path) -> TaughtRun:
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "run.toml"
        config.write_text(SIDES[side].run_file(folder), encoding="utf-8")
        return _run_of(side, seed, run_headway(config, folder=Path(place), options={"run.seed": seed}))


def _run_of(side: str, seed: int, found: RunFiles) -> TaughtRun:
    return TaughtRun(
        side=side,
        seed=seed,
        machine=described_machine(),
        accuracies=found.accuracies,
        sampled=found.sampled_until(found.accuracies),
        seconds=found.of_kind("step")[-1]["time_s"],
    )


def _read() -> list[TaughtRun]:
    known = json.loads((RESULTS / "self_distillation.json").read_text(encoding="utf-8"))
    return [TaughtRun(**with_steps(run, "accuracies", "sampled")) for run in known]


def _write(runs: Sequence[TaughtRun]) -> None:
    kept = json.dumps([asdict(run) for run in runs], indent=1)
    (RESULTS / "self_distillation.json").write_text(f"{kept}\n", encoding="utf-8")
    (RESULTS / "self_distillation.md").write_text(table(runs), encoding="utf-8")


def table(runs: Sequence[TaughtRun]) -> str:
    """The results as Markdown."""
    return "\n".join(
        [
            "# A policy that teaches itself",
            "",
            "`python -m benchmarks.self_distillation FOLDER --runs 3`, which says what is compared: addition, from a",
            "policy that copies an answer it is shown, with 64 completions a step. Accuracy of 1,000 held-out sums",
            f"without any hint, sampled at temperature 1; tokens are those sampled to train on up to {TARGET:.0%}.",
            "",
            f"| learns from | learning rate | seed | accuracy at steps | tokens to {TARGET:.0%} | seconds |",
            "|---|---|---|---|---|---|",
            *map(_row, sorted(runs, key=lambda run: list(SIDES).index(run.side))),
            "",
            *(_mean(side, [run for run in runs if run.side == side]) for side in dict.fromkeys(r.side for r in runs)),
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _row(run: TaughtRun) -> str:
    curve = ", ".join(f"{run.accuracies[step]:.3f} at {step}" for step in sorted(run.accuracies))
    tokens = "not reached" if run.reached is None else f"{run.reached:,}"
    return f"| {run.side} | {SIDES[run.side].rate:g} | {run.seed} | {curve} | {tokens} | {run.seconds:.0f} |"


def _mean(side: str, runs: Sequence[TaughtRun]) -> str:
    best = [max(run.accuracies.values()) for run in runs]
    last = [run.accuracies[max(run.accuracies)] for run in runs]
    return (
        f"- {side}: at best {statistics.fmean(best):.3f}, at the end {statistics.fmean(last):.3f}, of {len(runs)} seeds"
    )


if __name__ == "__main__":
    main()
