"""`python -m tests.chaos [--scenario NAME ...] [--seed S] [--faults N] [--list]`: chaos against the real processes."""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.outcomes import ScenarioOutcome, write_outcome
from tests.chaos.random_run import RANDOM, RANDOM_RANKS, random_run
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.tinker_run import TINKER, tinker_run
from tests.chaos.trial import run_trial
from tests.e2e.processes import ROOT

RESULTS = ROOT / "benchmarks/results"
_OTHERS = (RANDOM, RANDOM_RANKS, TINKER)


def main() -> int:
    """The exit code is 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS, *_OTHERS], help="default: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of every choice that is left to chance")
    parser.add_argument("--faults", type=int, default=30, help="of the random run")
    parser.add_argument("--kills", type=int, default=20, help="of the Tinker API's run; 0: two clients undisturbed")
    parser.add_argument("--model", type=Path, default=ROOT / "models/addition", help="the demo's model")
    parser.add_argument("--folder", type=Path, help="for the runs' files; a temporary one if left out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of chaos.jsonl and chaos.md")
    parser.add_argument("--list", action="store_true", help="name the scenarios and what they do")
    arguments = parser.parse_args()
    if arguments.list:
        for name, stage in SCENARIOS.items():
            print(f"{name:24} {stage.play.__doc__}")
        print(f"{RANDOM:24} {random_run.__doc__}")
        print(f"{RANDOM_RANKS:24} The same with a learner of two ranks.")
        print(f"{TINKER:24} {tinker_run.__doc__}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    broken = 0
    for name in arguments.scenario or [*SCENARIOS, *_OTHERS]:
        outcome = _play(name, arguments, folder=folder / name)
        write_outcome(outcome, lines=arguments.results / "chaos.jsonl", table=arguments.results / "chaos.md")
        print(
            f"{name}: {'all invariants hold' if outcome.passed else 'BROKEN'} after {outcome.seconds:.0f} s", flush=True
        )
        broken += not outcome.passed
    return 1 if broken else 0


def _play(name: str, arguments: argparse.Namespace, *, folder: Path) -> ScenarioOutcome:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {name}: {text}", flush=True)

    if name == TINKER:
        return tinker_run(folder=folder, kills=arguments.kills, seed=arguments.seed, say=say)
    if name in (RANDOM, RANDOM_RANKS):
        ranks = 1 if name == RANDOM else 2
        return random_run(folder=folder, faults=arguments.faults, seed=arguments.seed, say=say, ranks=ranks)
    model = arguments.model.resolve()
    return run_trial(name, SCENARIOS[name], folder=folder, model=model, seed=arguments.seed, say=say)


if __name__ == "__main__":
    sys.exit(main())
