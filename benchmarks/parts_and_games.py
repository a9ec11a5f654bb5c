"""Two algorithms for what the addition demo does not have: gdpo, for a reward that comes in parts, and rae, for games
that the policy plays with itself. Each beside those that a user would take instead.

    .venv/bin/python -m benchmarks.parts_and_games [--seeds 3] [--only parts | games] [--resume] [--report]

`parts` is addition of two digits from `models/addition`, whose training reward is the sum of two parts: 1 for the right
sum, and half for its first digit, which is the easier one. gdpo weighs the parts by itself, grpo sees the sum. What
counts is the right sum alone, on 2,000 held-out tasks.

`games` is Nim of `examples/nim` from its warm start, which is made if it is not there: both sides of each game are the
policy and are trained, and what counts is the share of 400 games that it wins against the model as it was before.
rae and reinforce_pp play 64 different games a step, once each, of which a comparison within a group learns nothing;
grpo plays 8 beginnings eight times. Results go to benchmarks/results/parts_and_games.{json,md}, a line for each run.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.env_learning import opponent, warm_up
from benchmarks.machine import described_machine, machines_of
from benchmarks.warm_system import Options, WarmSystem, warm_system
from env_service.environments.jsonl import split

RESULTS = Path(__file__).with_name("results")
ADDITION = Path(__file__).with_name("settings") / "addition.toml"
NIM = Path("examples/nim/run.toml")
HELD_OUT_SUMS = 2_000
HELD_OUT_GAMES = 400
_LIMIT_S = 1_800.0

Kind = Literal["parts", "games"]


@dataclass(frozen=True)
class ComparedSide:
    """A way to learn, with the learner's options."""

    kind: Kind
    options: Options


_SUMS = {
    "steps": 200,
    "evaluation.tasks": 0,
    "evaluation.final-tasks": HELD_OUT_SUMS,
    "training.optimizer.total-updates": 200,
}
_GAMES = {"steps": 100, "evaluation.tasks": 0, "evaluation.final-tasks": HELD_OUT_GAMES}
_ALONE = {"groups-per-step": 64, "rollouts.group-size": 1, "rollouts.min-group-size": 1}
SIDES: Mapping[str, ComparedSide] = {
    "gdpo": ComparedSide("parts", {**_SUMS, "algo": "gdpo", "algo.components": '{"correct": 1.0, "first": 0.5}'}),
    "grpo of the sum": ComparedSide("parts", {**_SUMS, "algo": "grpo"}),
    "rae": ComparedSide("games", {**_GAMES, **_ALONE, "algo": "rae"}),
    "reinforce_pp": ComparedSide("games", {**_GAMES, **_ALONE, "algo": "reinforce_pp"}),
    "grpo": ComparedSide("games", {**_GAMES, "algo": "grpo"}),
}


@dataclass(frozen=True)
class PlayedRun:
    """Numbers of a run that has ended: held-out accuracy before, after, and the ends of its interval of 95 %."""

    side: str
    seed: int
    machine: str
    before: float
    after: float
    low: float
    high: float
    max_lag: int
    seconds: float


def main() -> None:
    """Makes the runs, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side; default: %(default)s")
    parser.add_argument("--only", choices=("parts", "games"), help="one of the two tables")
    parser.add_argument("--resume", action="store_true", help="without the runs that the results have")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    given = parser.parse_args()
    store = RESULTS / "parts_and_games.json"
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    runs = {(run.side, run.seed): run for run in (PlayedRun(**each) for each in known)}
    kinds: tuple[Kind, ...] = () if given.report else (given.only,) if given.only else ("parts", "games")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as place, _system(kind, Path(place)) as system:
            for seed in range(given.seeds):
                for name in (name for name, side in SIDES.items() if side.kind == kind):
                    if given.resume and (name, seed) in runs:
                        continue
                    runs[name, seed] = run = _run(name, seed, system=system)
                    store.write_text(json.dumps([asdict(each) for each in runs.values()], indent=1) + "\n")
                    print(
                        f"{name}, seed {seed}: {run.before:.3f} to {run.after:.3f} in {run.seconds:.0f} s", flush=True
                    )
    (RESULTS / "parts_and_games.md").write_text(table(list(runs.values())), encoding="utf-8")


@contextmanager
def _system(kind: Kind, folder: Path) -> Iterator[WarmSystem]:
    with ExitStack() as stack:
        if kind == "games":
            warm_up("nim")
            stack.enter_context(opponent("nim"))
        yield stack.enter_context(
            warm_system(NIM if kind == "games" else write_sums(folder), folder=folder, options={})
        )


def write_sums(folder: Path) -> Path:
    """Tasks of addition with a reward in two parts, held-out ones by the right sum alone; their run file."""
    training, evaluation = split()
    held_out = random.Random(5).sample(evaluation, HELD_OUT_SUMS)
    for name, pairs, line in (("train", training, _in_parts), ("held_out", held_out, _whole)):
        text = "".join(f"{json.dumps(line(*divmod(pair, 100)))}\n" for pair in pairs)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    head, found, _ = ADDITION.read_text(encoding="utf-8").partition("\n[[env-service.environments]]")
    assert found, f"{ADDITION} has another shape than expected: its environments at the end"
    config = folder / "run.toml"
    config.write_text(
        f'{head}\n[[env-service.environments]]\nname = "sums"\nsource = "jsonl"\nchat = false\n'
        f'train_file = "{folder}/train.jsonl"\nevaluation_file = "{folder}/held_out.jsonl"\n',
        encoding="utf-8",
    )
    return config


def _whole(left: int, right: int) -> Mapping[str, object]:
    answer = {"verifier": "exact_match", "arguments": {"answer": f"{left + right:03d}"}}
    return {"prompt": f"{left:02d}+{right:02d}=", **answer}


def _in_parts(left: int, right: int) -> Mapping[str, object]:
    whole = _whole(left, right)
    first = {"patterns": [{"pattern": f"{(left + right) // 100}.*", "match": "full"}]}
    parts = [
        {"verifier": whole["verifier"], "arguments": whole["arguments"], "name": "correct"},
        {"verifier": "regex", "arguments": first, "name": "first", "weight": 0.5},
    ]
    return {"prompt": whole["prompt"], "verifier": "composite", "arguments": {"parts": parts}}


def _run(name: str, seed: int, *, system: WarmSystem) -> PlayedRun:
    options = {**SIDES[name].options, "seed": seed, "rollouts.seed": seed}
    found = system.learn(f"{name.replace(' ', '_')}-{seed}", options=options, limit_s=_LIMIT_S).summary
    return PlayedRun(
        side=name,
        seed=seed,
        machine=described_machine(),
        before=found.evaluation_before.accuracy,
        after=found.evaluation_after.accuracy,
        low=found.evaluation_after.accuracy_low,
        high=found.evaluation_after.accuracy_high,
        max_lag=found.max_lag_seen,
        seconds=found.train_wall_s,
    )


def table(runs: Sequence[PlayedRun]) -> str:
    """The results as Markdown."""
    return "\n".join(
        [
            "# A reward in parts, and games of the policy with itself",
            "",
            "`python -m benchmarks.parts_and_games`, which says what is compared.",
            *_section("Addition, whose reward is in parts: right sums, held out", "parts", runs),
            *_section("Nim: games won against the model of before", "games", runs),
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _section(title: str, kind: Kind, runs: Sequence[PlayedRun]) -> list[str]:
    of_kind = [run for run in runs if SIDES[run.side].kind == kind]
    order = list(SIDES)
    return [
        "", f"## {title}", "",
        "| learns by | seed | before | after | of 95 % | max lag | seconds |", "|---|---|---|---|---|---|---|",
        *(
            f"| {run.side} | {run.seed} | {run.before:.3f} | **{run.after:.3f}** | {run.low:.3f} to {run.high:.3f} "
            f"| {run.max_lag} | {run.seconds:.0f} |"
            for run in sorted(of_kind, key=lambda run: (order.index(run.side), run.seed))
        ),
        "",
        *(f"- {side}: {_mean(runs, side)}" for side in order if any(run.side == side for run in of_kind)),
    ]  # fmt: skip


def _mean(runs: Sequence[PlayedRun], side: str) -> str:
    ends = [run.after for run in runs if run.side == side]
    spread = f", deviation {statistics.stdev(ends):.3f}" if len(ends) > 1 else ""
    return f"{statistics.fmean(ends):.3f} in the mean of {len(ends)}{spread}"


if __name__ == "__main__":
    main()
