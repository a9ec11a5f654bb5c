"""The soak: the demo's loop with tiny steps, for hours' worth of them, under a fault every so many steps.

    python -m benchmarks.soak [--steps 50000] [--faults 250] [--minutes M] [--seed S] [--folder DIR]

The real learner (DeepSpeed, one rank), env_service and reward_service, on real sockets, are killed, stopped and
started, and hung, by chance from the seed; the learner resumes. The generator is the real one but for its engine: a
tiny torch model takes vLLM's place (`generator.py`), which two cores are too slow for. In each quarter of the run one
process is spared all but hangs, so that each has a long life, too.

Measured from outside every 15 s: memory of each process and disk of the run's folder by kind; at each fault, the time
until the next step. `--minutes` ends the run in good order at the step that it has reached.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.soak.report import write_report
from benchmarks.soak.run_files import write_run_file
from benchmarks.soak.soaking import Note, Soaking, Verdict, append
from benchmarks.soak.system import ARCHIVE, StepReader, ports, run_folder, system_of
from benchmarks.soak.verdict import broken
from tests.chaos.journal_reader import Archive

LINES = "soak.jsonl"
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """The exit code is 1 if something grew or broke."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    folder: Path = arguments.judge or arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    if arguments.judge is None:
        _soak(folder, arguments)
    return judge(folder, results=arguments.results, name=arguments.name, notes=arguments.note)


def _soak(folder: Path, arguments: argparse.Namespace) -> None:
    """Runs it and leaves its files in the folder."""
    if run_folder(folder).exists():
        raise SystemExit(f"{folder} holds a run already: name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    run_file = write_run_file(folder, steps=arguments.steps, seed=arguments.seed, ports=ports())
    system = system_of(folder, run_file, mark=uuid.uuid4().hex)
    soaking = Soaking(
        system=system,
        lines=folder / LINES,
        steps=arguments.steps,
        every_steps=arguments.steps / arguments.faults,
        most_s=60.0 * arguments.minutes,
        seed=arguments.seed,
        random=random.Random(arguments.seed),
        say=TimedSaying(time.monotonic()),
    )
    with Archive(run=system.run, folder=folder / ARCHIVE) as archive:
        try:
            soaking.run()
        finally:
            system.end()
        archive.look()


def judge(folder: Path, *, results: Path, name: str, notes: list[str]) -> int:
    """Checks the history that a soak has left, and writes the results; 1 if something grew or broke."""
    for text in notes:
        append(folder / LINES, Note(kind="note", text=text))
    steps = StepReader(run_folder(folder) / "metrics.jsonl").read()
    append(folder / LINES, Verdict(kind="verdict", broken=broken(folder, steps=steps)))
    shutil.copy(folder / LINES, results / f"{name}.jsonl")
    found = write_report(results, name=name)
    for text in found:
        print(f"FOUND {text}")
    return 1 if found else 0


class TimedSaying:
    """Says what happens, with the time since the start."""

    def __init__(self, began: float) -> None:
        self._began = began

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--faults", type=int, default=250, help="on average, over all steps; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="end by then, at whatever step")
    parser.add_argument("--seed", type=int, default=0, help="of faults and model; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="for the run's files; a temporary one if left out")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="run nothing: judge what a soak has left in a folder")
    parser.add_argument(
        "--note", action="append", default=[], metavar="TEXT", help="what a reader of the results should know besides"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--name", default="soak", help="of the results: NAME.jsonl, NAME.md and NAME.png")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
