"""The RLHF chain of examples/rlhf over max_lag: gold win rate against the SFT model, and KL to it, as runs go on.

    .venv/bin/python -m benchmarks.rlhf_chain [--folder FOLDER] [--steps N] [--algos NAME ...] [--lags N ...]

Makes data and the SFT and reward models by the example's own run files, then serves generator, reward model and
environment once, and trains one policy for each algorithm and bound on the lag. Every checkpoint is judged by the gold
reward on held-out prompts. One line for each goes to benchmarks/results/rlhf_chain.jsonl, and from all lines there the
table and the figure are made: the axes are those of Asynchronous RLHF (arXiv 2410.18252). Stages whose models are in
the folder already, and runs whose lines are in the results, are not made again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.rlhf_report import Point, figure, read_points, table
from examples.rlhf.judge import WinRateJudge, read_prompts
from examples.rlhf.language import LetterLanguage
from learner.config import LearnerConfig
from learner.run_ranks import LearnerRanks
from learner.training.trainer import Trainer
from services.process import parent_death_signal

RESULTS = Path(__file__).with_name("results")
EXAMPLE = Path("examples/rlhf")
PORTS = {"learner": 27400, "leases": 27401, "generator": 27410, "reward-service": 27420, "env-service": 27430}
MAX_RUN_S = 600.0
ALGORITHMS: Mapping[str, Mapping[str, object]] = {
    "online_dpo": {"algo.beta": 0.1, "training.optimizer.learning-rate": 1.5e-4},
    "grpo": {"algo.kl-coefficient": 0.01, "training.optimizer.learning-rate": 1.5e-4},
}


@dataclass(frozen=True)
class Stages:
    """Places of the chain's models and files."""

    folder: Path

    @property
    def start(self) -> Path:
        return self.folder / "init"

    @property
    def sft(self) -> Path:
        return self.folder / "sft"

    @property
    def reward_model(self) -> Path:
        return self.folder / "rm"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"


@dataclass(frozen=True)
class ChainVariant:
    """A run with samples from generators. `options` are the learner's beside those of examples/rlhf/run.toml."""

    algo: str
    max_lag: int
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        return f"{self.algo}-lag{self.max_lag}"


def main() -> None:
    """Makes what is not there yet, then rewrites the table and the figure."""
    arguments = _arguments()
    torch.set_num_threads(1)
    stages = Stages(arguments.folder)
    _make_models(stages)
    RESULTS.mkdir(exist_ok=True)
    store = RESULTS / "rlhf_chain.jsonl"
    done = {(point.algo, point.max_lag) for point in read_points(store)}
    variants = [
        ChainVariant(algo=algo, max_lag=lag, options={**ALGORITHMS[algo], "steps": arguments.steps})
        for lag in arguments.lags
        for algo in arguments.algos
        if (algo, lag) not in done
    ]
    if variants:
        _train_and_judge(variants, stages, store, every=arguments.every)
    points = read_points(store)
    (RESULTS / "rlhf_chain.md").write_text(table(points), encoding="utf-8")
    figure(points, RESULTS / "rlhf_chain.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/rlhf-chain"), help="for models and runs")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=12, help="steps between two judged checkpoints")
    parser.add_argument("--algos", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--lags", nargs="*", type=int, default=[0, 1, 2, 4, 8])
    return parser.parse_args()


def _make_models(stages: Stages) -> None:
    start, place = stages.start, ["--run.directory", str(stages.runs)]
    if not (start / "held_out.jsonl").exists():
        _call([sys.executable, "-m", "examples.rlhf.make_data", str(start)])
    for name, model, output, data in (
        ("sft", start, stages.sft, start / "sft.jsonl"),
        ("rm", stages.sft, stages.reward_model, start / "preferences.jsonl"),
    ):
        if not (output / "config.json").exists():
            paths = ["--model", str(model), "--output", str(output), "--data.path", str(data)]
            _call([_script("learner"), "--config", str(EXAMPLE / f"{name}.toml"), *paths, *place])


def _train_and_judge(variants: Sequence[ChainVariant], stages: Stages, store: Path, *, every: int) -> None:
    prompts = read_prompts(stages.start / "held_out.jsonl")
    judge = WinRateJudge(
        sft=stages.sft, reward_model=stages.reward_model, prompts=prompts, language=LetterLanguage.of_seed(0), seed=0
    )
    with _services(stages), _checkpoint_reader(stages) as reader, store.open("a", encoding="utf-8") as lines:
        for variant in variants:
            folder = _train(variant, stages, every=every)
            for point in _points(variant, folder, judge, reader):
                lines.write(json.dumps(asdict(point)) + "\n")
                lines.flush()
                print(point, flush=True)


def _train(variant: ChainVariant, stages: Stages, *, every: int) -> Path:
    """Runs the learner once; returns its folder."""
    options = {
        "model": stages.sft,
        "algo": variant.algo,
        **variant.options,
        "max-lag": variant.max_lag,
        "lag.pacing": "full",  # tokens as old as the bound allows, not only as old as the learner's need makes them
        "checkpoint.every-steps": every,
        "checkpoint.keep": 1 + int(str(variant.options["steps"])) // every,
        "checkpoint.journal": "false",
        "evaluation.final-tasks": 0,
        "rollouts.group-size": 4,
        "http.port": PORTS["learner"],
        "leases.address": f"tcp://127.0.0.1:{PORTS['leases']}",
        "run.name": variant.name,
        "run.directory": stages.runs,
    }
    _call([_script("learner"), "--config", str(EXAMPLE / "run.toml"), *_words(options)])
    return stages.runs / variant.name


def _points(variant: ChainVariant, folder: Path, judge: WinRateJudge, reader: Trainer) -> Iterator[Point]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lags = {int(lag): count for lag, count in summary["token_lag_histogram"].items()}
    for checkpoint in sorted(path for path in folder.glob("checkpoint-*") if path.is_dir()):
        with tempfile.TemporaryDirectory() as model:
            reader.load(checkpoint / "trainer")
            reader.export(Path(model))
            judgement = judge.judge(Path(model))
        yield Point(
            algo=variant.algo,
            max_lag=variant.max_lag,
            step=int(checkpoint.name.removeprefix("checkpoint-")),
            lag_mean=sum(lag * count for lag, count in lags.items()) / sum(lags.values()),
            train_wall_s=summary["train_wall_s"],
            **asdict(judgement),
        )


@contextmanager
def _checkpoint_reader(stages: Stages) -> Iterator[Trainer]:
    """A trainer that trains nothing: it reads what the learner saved."""
    with LearnerRanks(LearnerConfig(model=stages.sft), argv=()) as ranks:
        trainer = ranks.open_trainer(should_stop=lambda: False)
        yield trainer
        trainer.close()


@contextmanager
def _services(stages: Stages) -> Iterator[None]:
    """Generator, reward service and env service, which outlive the learners that they work for."""
    learner, leases = f"http://127.0.0.1:{PORTS['learner']}", f"tcp://127.0.0.1:{PORTS['leases']}"
    environment = {
        "name": "writing",
        "source": "jsonl",
        "chat": False,
        "train_file": str(stages.start / "tasks.jsonl"),
        "evaluation_file": str(stages.start / "held_out.jsonl"),
    }
    served = {"name": "reward_model", "path": str(stages.reward_model), "batch_size": 128}
    options: dict[str, dict[str, object]] = {
        "reward-service": {"reward-models": json.dumps([served])},
        # All groups that the largest bound allows are sampled at once: only then do tokens become as old as it allows.
        "generator": {"model": stages.sft, "join.learner": learner, "engine.max-num-seqs": 640},
        "env-service": {
            "model": stages.sft,
            "capacity": 160,
            "learner": leases,
            "reward-urls": f"http://127.0.0.1:{PORTS['reward-service']}",
            "environments": json.dumps([environment]),
        },
    }
    with ExitStack() as stack:
        for name, own in options.items():
            words = _words({**own, "http.port": PORTS[name], "run.directory": stages.runs})
            stack.enter_context(_running(name, words, stages))
        yield


@contextmanager
def _running(name: str, words: Sequence[str], stages: Stages) -> Iterator[None]:
    with (stages.folder / f"{name}.log").open("wb") as log:
        command = [_script(name), "--config", str(EXAMPLE / "run.toml"), *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=parent_death_signal)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _call(command: Sequence[str]) -> None:
    """Runs to the end; its output is shown only if it fails, with SystemExit then."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=MAX_RUN_S, preexec_fn=parent_death_signal
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )


def _words(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


if __name__ == "__main__":
    main()
