"""Learning of a mixture of experts from old tokens, with router replay and without it.

    .venv/bin/python -m benchmarks.router_replay_runs [--seeds 3] [--steps 150] [--report]

A small Qwen3-MoE of 32 experts, 4 of them for a token, is warmed up on worked sums as `make demo` warms up its Llama,
and then trained on addition by grpo: four updates a step, at a lag of up to 8, by a learner in float32 and a generator
in bfloat16. Its routers take the engine's experts or make their own choice, with the default correction for old tokens
and without one; all else is alike, and the four take turns. One generator, reward-service and env-service stay up for
all. Results go to benchmarks/results/router_replay_runs.{json,md}; runs that were measured before stay in them until
they are made again.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.algorithm_runs import AlgorithmRun
from benchmarks.algorithms import STALE_SERVICES
from benchmarks.machine import described_machine, machines_of
from benchmarks.other_models import warm_up, write_model
from benchmarks.warm_system import FinishedRun, Options, Service, WarmSystem, warm_system

CONFIG = Path(__file__).with_name("settings") / "addition.toml"
RESULTS = Path(__file__).with_name("results")
EXPERTS: Mapping[str, object] = {
    "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}  # fmt: skip
SIDES = [(replay, corrected) for corrected in (True, False) for replay in (True, False)]
LIMIT_S = 1200.0


@dataclass(frozen=True)
class ReplayRun:
    """Numbers of a run that has ended. `kl` is the mean of the steps' estimates of KL(behavior || policy), in nats;
    `changed` the mean share of the replayed choices that the learner's own routers would have made otherwise, None
    without replay.
    """

    replay: bool
    corrected: bool
    seed: int
    steps: int
    machine: str
    before: float
    after: float
    kl: float | None
    changed: float | None
    replayed: float | None
    lag_mean: float
    lag_max: int
    seconds: float


def main() -> None:
    """Makes the runs, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side; default: %(default)s")
    parser.add_argument("--steps", type=int, default=150, help="of a run; default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only rewrite the table")
    given = parser.parse_args()
    store = RESULTS / "router_replay_runs.json"
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    runs = {(run.corrected, run.replay, run.seed): run for run in (ReplayRun(**each) for each in known)}
    if not given.report:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_model("Qwen3Moe", EXPERTS, folder / "random")
            model = warm_up(folder / "random", folder=folder)
            with warm_system(CONFIG, folder=folder / "runs", options=_services(model)) as system:
                for seed in range(given.seeds):
                    for replay, corrected in SIDES:
                        run = _run(system, model, replay=replay, corrected=corrected, seed=seed, steps=given.steps)
                        runs[corrected, replay, seed] = run
                        store.write_text(json.dumps([asdict(each) for each in runs.values()], indent=1) + "\n")
                        print(run, flush=True)
    text = table(list(runs.values()))
    (RESULTS / "router_replay_runs.md").write_text(text, encoding="utf-8")
    print(text)


def _services(model: Path) -> dict[Service, Options]:
    return {
        "generator": {
            **STALE_SERVICES["generator"],
            "model": model,
            "engine.dtype": "bfloat16",
            "engine.routed-experts": "on",
        },
        "env-service": {**STALE_SERVICES["env-service"], "model": model},
    }


def _run(system: WarmSystem, model: Path, *, replay: bool, corrected: bool, seed: int, steps: int) -> ReplayRun:
    switch = "on" if replay else "off"
    settings = AlgorithmRun(
        variant=f"replay {switch}{'' if corrected else ' uncorrected'}",
        algo="grpo",
        steps=steps,
        seed=seed,
        max_lag=8,
        updates_per_step=4,
        extra={
            "model": model,
            "guard.enabled": "false",
            "lag.pacing": "full",
            "training.router.replay": switch,
            **({} if corrected else {"algo.correction": "none"}),
        },
    )
    finished = system.learn(settings.name, options=settings.options, limit_s=LIMIT_S)
    return _run_of(finished, replay=replay, corrected=corrected, seed=seed)


def _run_of(finished: FinishedRun, *, replay: bool, corrected: bool, seed: int) -> ReplayRun:
    summary = finished.summary
    return ReplayRun(
        replay=replay,
        corrected=corrected,
        seed=seed,
        steps=summary.steps,
        machine=described_machine(),
        before=summary.evaluation_before.accuracy,
        after=summary.evaluation_after.accuracy,
        kl=finished.step_mean("behavior_kl"),
        changed=finished.step_mean("router_changed_share"),
        replayed=finished.step_mean("router_replayed_share"),
        lag_mean=summary.lag_mean,
        lag_max=summary.max_lag_seen,
        seconds=summary.train_wall_s,
    )


def table(runs: Sequence[ReplayRun]) -> str:
    """The results as Markdown, with a mean for each side."""
    rows, means = [], []
    for replay, corrected in SIDES:
        side = sorted(
            (run for run in runs if (run.replay, run.corrected) == (replay, corrected)), key=lambda run: run.seed
        )
        rows += [_row(run) for run in side]
        if side:
            ends = [run.after for run in side]
            means.append(
                f"- {_named(side[0])}: {statistics.fmean(ends):.3f} in the mean, {min(ends):.3f} to {max(ends):.3f}; "
                f"KL {statistics.fmean(run.kl for run in side if run.kl is not None):.1e}"
            )
    return "\n".join(
        [
            "# Learning of a mixture of experts from old tokens, with router replay and without it",
            "",
            "`python -m benchmarks.router_replay_runs`, which says what is compared. Accuracy of 2,000 held-out sums,",
            "sampled at temperature 1. KL: the mean estimate over the steps, behavior against policy, in nats. Told:",
            "the share of the choices of experts that the engine told. Changed: the share of these that the routers",
            "of the learner would have made otherwise.",
            "",
            "| routers take the engine's experts | correction | seed | steps | before | after | KL | told | changed "
            "| lag, mean | most | training, s |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            *means,
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _named(run: ReplayRun) -> str:
    return f"{'with' if run.replay else 'without'} replay, {'corrected' if run.corrected else 'not corrected'}"


def _row(run: ReplayRun) -> str:
    told, changed = ("–" if share is None else f"{share:.1%}" for share in (run.replayed, run.changed))
    return (
        f"| {'yes' if run.replay else 'no'} | {'default' if run.corrected else 'none'} | {run.seed} | {run.steps} "
        f"| {run.before:.3f} | **{run.after:.3f}** | {'–' if run.kl is None else f'{run.kl:.1e}'} | {told} | {changed} "
        f"| {run.lag_mean:.1f} | {run.lag_max} | {run.seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
