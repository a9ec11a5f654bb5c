"""The command: many seeds over all cores, or one of them to be read."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LINES = 60


@dataclass
class Totals:
    """Sums over many seeds."""

    seeds: int = 0
    virtual_s: float = 0.0
    callbacks: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    code: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    profiles: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, line: dict[str, object]) -> None:
        """Adds one seed's line."""
        self.seeds += 1
        self.virtual_s += float(str(line["virtual_s"]))
        self.callbacks += int(str(line["callbacks"]))
        self.steps += int(str(line["steps"]))
        self.cpu_s += float(str(line["cpu_s"]))
        self.code[str(line["code"])] += 1
        faults = line["faults"]
        assert isinstance(faults, list)
        self.faults.update(faults)
        self.profiles[str(line["profile"])] += 1
        if line["violation"]:
            self.failures[int(str(line["seed"]))] = str(line["violation"])


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 1 if a seed failed."""
    arguments = _parser().parse_args(argv)  # before anything else: the simulation takes the words away
    if arguments.rehearse:
        sys.exit(_rehearse())
    if arguments.seed is not None:
        sys.exit(_one(arguments.seed, tenants=arguments.tenants, shorten=arguments.shorten, verbose=arguments.verbose))
    if arguments.worker:
        for seed in json.load(sys.stdin) if arguments.seeds == "-" else _range(arguments.seeds):
            _report(seed, tenants=arguments.tenants)
        os._exit(0)  # without taking apart what the last runs left
    seeds = _range(arguments.seeds)
    totals = _many(
        seeds,
        tenants=arguments.tenants,
        kept=arguments.kept,
        processes=arguments.processes,
        stop_at_first=arguments.first,
        longest_s=60 * arguments.minutes,
    )
    text = table(totals, seeds=seeds, tenants=arguments.tenants)
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    sys.exit(1 if totals.failures else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", default="1-200", help="first and last seed, such as 1-10000")
    parser.add_argument("--seed", type=int, help="one seed, with its history")
    parser.add_argument(
        "--tenants", action="store_true", help="seeds of the service of the Tinker API, not of a run with its four"
    )
    parser.add_argument("--shorten", action="store_true", help="with --seed: the smallest scenario that fails alike")
    parser.add_argument("--verbose", action="store_true", help="with --seed: the whole history, not only its end")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that simulate")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many, with what was reached")
    parser.add_argument(
        "--kept",
        type=Path,
        help="file with a line for each seed: those that it has of the same commit are not run again",
    )
    parser.add_argument("--first", action="store_true", help="end at the first seed that fails")
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _report(seed: int, *, tenants: bool = False) -> None:
    """A line of JSON."""
    drawn, simulate, _ = _world(tenants=tenants)
    scenario = drawn(seed)
    began = time.process_time()
    result = simulate(scenario)
    line = {
        "seed": seed, "profile": scenario.profile, "virtual_s": round(result.virtual_s, 3),
        "callbacks": result.callbacks, "steps": result.steps, "cpu_s": round(time.process_time() - began, 3),
        "faults": [fault.kind for fault in scenario.faults], "fingerprint": result.fingerprint,
        "violation": None if result.violation is None else str(result.violation),
    }  # fmt: skip
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _world(*, tenants: bool) -> tuple[Any, Any, Any]:
    """The scenario of a seed, a run of a scenario, and what is smaller than one: of tenants, or of a run with its four
    processes.
    """
    from simulation.install import install

    install()
    if tenants:
        from simulation.checking.tenant_run import simulate_tenants
        from simulation.checking.tenant_scenario import smaller_tenants, tenant_scenario_of

        return tenant_scenario_of, simulate_tenants, smaller_tenants
    from simulation.checking.invariants import simulate
    from simulation.checking.scenario import scenario_of, smaller

    return scenario_of, simulate, smaller


def _rehearse() -> int:
    """Runs that are planned, a JSON object in each line of stdin; a line of its steps for each."""
    from simulation.install import install

    install()
    from simulation.checking.invariants import Rehearsal, rehearse

    for line in sys.stdin:
        given = json.loads(line)
        given |= {name: tuple(given[name]) for name in ("train_s", "lengths", "readings") if name in given}
        steps = [entry for entry in rehearse(Rehearsal(**given)) if entry.get("kind") == "step"]
        kept = ("time_s", "wait_s", "train_s", "copy_s", "sampled_tokens", "lag_counts", "lag_bound", "trajectories")
        _say(json.dumps([{name: step[name] for name in kept} for step in steps]) + "\n")
        sys.stdout.flush()
    return 0


def _one(seed: int, *, tenants: bool, shorten: bool, verbose: bool) -> int:
    drawn, simulate, smaller = _world(tenants=tenants)
    from simulation.checking.invariants import shortened

    scenario = drawn(seed)
    result = simulate(scenario)
    if shorten and result.violation is not None:
        scenario, result = shortened(
            scenario, result, said=lambda text: _say(f"shortened to {text}\n"), simulated=simulate, less=smaller
        )
    _say(f"seed {seed}, {scenario.profile}: {scenario.settings}\n")
    for fault in scenario.faults:
        _say(f"  at {fault.at:8.1f} s  {fault}\n")
    history = result.history if verbose else result.history[-_LINES:]
    for event in history:
        _say(f"{event}\n")
    _say(f"{result.steps} steps, {result.virtual_s:.0f} virtual seconds, fingerprint {result.fingerprint}\n")
    _say("every promise was kept\n" if result.violation is None else f"BROKEN: {result.violation}\n")
    return 0 if result.violation is None else 1


def _say(text: str) -> None:
    sys.stdout.write(text)


def _many(
    seeds: range, *, tenants: bool, kept: Path | None, processes: int, stop_at_first: bool, longest_s: float
) -> Totals:
    totals = Totals()
    code = _commit()
    began = time.monotonic()
    done = _kept(kept, seeds, code=code)
    for line in done.values():
        totals.add(line)
    for line in _lines([seed for seed in seeds if seed not in done], tenants=tenants, processes=processes):
        line["code"] = code
        totals.add(line)
        if kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if line["violation"]:
            sys.stderr.write(f"\rseed {line['seed']}: {line['violation']}\n")
            if stop_at_first:
                break
        if time.monotonic() - began > longest_s:
            break
        hours = totals.virtual_s / 3600
        sys.stderr.write(
            f"\r{totals.seeds} of {len(seeds)} seeds, {hours:.1f} virtual hours, {len(totals.failures)} failed "
        )
        sys.stderr.flush()
    sys.stderr.write("\n")
    return totals


def _kept(file: Path | None, seeds: range, *, code: str) -> dict[int, dict[str, object]]:
    """The lines of earlier runs of this very code, by seed: what other code promised says nothing of this one. A seed
    that failed is run again.
    """
    if file is None or not file.exists() or "dirty" in code:
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    alike = [line for line in lines if line["code"] == code and line["seed"] in seeds]
    return {line["seed"]: line for line in alike if not line["violation"]}


def _lines(seeds: Sequence[int], *, tenants: bool, processes: int) -> Iterator[dict[str, object]]:
    """The lines of all workers, as they come. Each worker has a share of the seeds."""
    shares = [seeds[index::processes] for index in range(min(processes, len(seeds)))]
    cores = sorted(os.sched_getaffinity(0))
    workers = [_worker(share, tenants=tenants, core=cores[index % len(cores)]) for index, share in enumerate(shares)]
    try:
        yield from _merged(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _worker(share: Sequence[int], *, tenants: bool, core: int) -> "subprocess.Popen[bytes]":
    """A process for some seeds, held on one core: its threads take turns, which is slower from core to core."""
    from simulation.workers import started_worker  # imports of the product, which nothing that simulates may come after

    return started_worker(share, tenants=tenants, core=core, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _merged(workers: Sequence["subprocess.Popen[bytes]"]) -> Iterator[dict[str, object]]:
    import selectors

    selector = selectors.DefaultSelector()
    for worker in workers:
        assert worker.stdout is not None
        selector.register(worker.stdout, selectors.EVENT_READ, worker)
    while selector.get_map():
        for key, _ in selector.select():
            line = key.fileobj.readline()  # type: ignore[union-attr]
            if line:
                yield json.loads(line)
                continue
            selector.unregister(key.fileobj)
            if key.data.wait() != 0:
                raise RuntimeError(f"a worker ended with {key.data.returncode}: its last lines say why")


def _commit() -> str:
    """Of the code that was simulated, if git knows it."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return f"`{asked.stdout.strip()}`" if asked.returncode == 0 else "of no commit"


def table(totals: Totals, *, seeds: range, tenants: bool = False) -> str:
    """The result in Markdown."""
    kinds = "\n".join(f"| {kind} | {count} |" for kind, count in sorted(totals.faults.items()))
    failed = "\n".join(f"| {seed} | {what} |" for seed, what in sorted(totals.failures.items()))
    profiles = ", ".join(f"{name} {count}" for name, count in sorted(totals.profiles.items()))
    code = ", ".join(f"{name}: {count} seeds" for name, count in totals.code.most_common())
    return f"""# Simulation{" of tenants" * tenants}

`python -m simulation {"--tenants " * tenants}--seeds {seeds.start}-{seeds.stop - 1}`.

| what | how many |
|---|---|
| code | {code} |
| seeds | {totals.seeds} of {len(seeds)} ({profiles}) |
| virtual hours | {totals.virtual_s / 3600:.1f} |
| callbacks | {totals.callbacks:,} |
| training steps | {totals.steps:,} |
| faults | {totals.faults.total()} |
| failed seeds | {len(totals.failures)} |
| CPU seconds | {totals.cpu_s:.0f} |

| fault | times |
|---|---|
{kinds}

| failed seed | promise that was broken |
|---|---|
{failed or "| none | |"}
"""


if __name__ == "__main__":
    main()
