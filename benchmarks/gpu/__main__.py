"""Ten minutes on one GPU, without a network: what no CPU can show of Headway, as one table.

    make gpu   or   python -m benchmarks.gpu [--only PART ...] [--output FILE.jsonl] [--markdown FILE.md] [--list]

Each row is printed as it comes and appended to --output, so that a run that is broken off keeps what it has. Each part
has a process and a time limit of its own; what it prints besides goes to a log beside the output. A part that lacks
something here is skipped by name. The exit code is 1 if a part failed. --rehearsal runs all parts on a CPU with tiny
sizes, gloo in NCCL's place: it shows that they run, and measures nothing.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import REHEARSAL, GpuRow, table
from benchmarks.gpu.runner import run_parts

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """The exit code."""
    given = _arguments()
    chosen = [part for part in PARTS if not given.only or part.name in given.only]
    if given.list:
        print("\n".join(f"{part.limit_s:4g} s at most  {part.name}: {part.about}" for part in chosen))
        return 0
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[GpuRow] = []

    def say(row: GpuRow) -> None:
        rows.append(row)
        print(row.told, flush=True)
        with given.output.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")
        given.markdown.write_text(table(rows), encoding="utf-8")

    log = given.output.with_suffix(".log")
    well = run_parts(chosen, say=say, log=log, minutes=given.minutes, rehearsal=given.rehearsal)
    print(f"\n{table(rows)}\nwritten: {given.output}, {given.markdown}; all else that was printed: {log}")
    return 0 if well else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts alone")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.jsonl", help="rows are appended; %(default)s")
    parser.add_argument("--markdown", type=Path, help="the table of this run; beside the output if left out")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it; %(default)s")
    parser.add_argument("--list", action="store_true", help="show the parts with their limits, and end")
    parser.add_argument(REHEARSAL, action="store_true", help="on a CPU, tiny: shows that the parts run")
    given = parser.parse_args()
    given.markdown = given.markdown or given.output.with_suffix(".md")
    return given


if __name__ == "__main__":
    sys.exit(main())
